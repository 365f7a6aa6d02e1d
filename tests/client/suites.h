/* suites.h - the test cases of the client, one file each. */
#ifndef TESTS_CLIENT_SUITES_H
#define TESTS_CLIENT_SUITES_H

#include <check.h>

TCase *case_args(void);
TCase *case_connect(void);
TCase *case_content(void);
TCase *case_error(void);
TCase *case_histogram(void);
TCase *case_prefix(void);
TCase *case_tensor(void);
TCase *case_trace(void);

#endif /* TESTS_CLIENT_SUITES_H */
