/* check_parts.h - the two halves of dsk-check. One thread. */
#ifndef DSK_TOOLS_CHECK_PARTS_H
#define DSK_TOOLS_CHECK_PARTS_H

#include "check_kit.h"

/* Runs every folder of dir; an unreadable or unknown folder is a failed check. -1 if dir cannot be listed. */
int check_vectors(struct check *c, const char *dir);

/* Runs n_cases random shapes of attend, and with each an append, a read, a gather, a map and a merge. */
void check_random(struct check *c, int n_cases);

#endif /* DSK_TOOLS_CHECK_PARTS_H */
