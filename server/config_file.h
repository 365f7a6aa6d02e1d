/* config_file.h - settings from a YAML file and from the environment, by the table of config.c. At the start and on SIGHUP. */
#ifndef SERVER_CONFIG_FILE_H
#define SERVER_CONFIG_FILE_H

#include "server/config.h"

/* The file that --config names, else DSAD_CONFIG, else NULL. DSA_E_BAD_REQUEST: --config without a value. environment: as
 * environ, "NAME=value" and NULL at the end. */
SRV_MUST_CHECK dsa_status srv_config_file_name(int argc, char **argv, char **environment, const char **path_p,
                                               struct srv_err *err);

/* A mapping of option names to single values. DSA_E_BAD_REQUEST with field = the key and the file's line in the text: unknown
 * key (the nearest is named), a value that the option refuses, a key twice, nested values, no YAML. DSA_E_SYSTEM: the file
 * cannot be read. */
SRV_MUST_CHECK dsa_status srv_config_read_file(struct srv_config *config, const char *path,
                                               struct srv_err *err);

/* Variables DSAD_SOME_KEY. Unknown ones are refused, but for DSAD_CONFIG and those that Kubernetes makes for a service named
 * dsad (DSAD_SERVICE_*, DSAD_PORT*). DSA_E_BAD_REQUEST with field = the variable. */
SRV_MUST_CHECK dsa_status srv_config_read_environment(struct srv_config *config, char **environment,
                                                      struct srv_err *err);

/* Default, file, environment, flags: the later wins. Errors as of each. */
SRV_MUST_CHECK dsa_status srv_config_read(struct srv_config *config, int argc, char **argv,
                                          char **environment, enum srv_config_action *action_p,
                                          struct srv_err *err);

#endif /* SERVER_CONFIG_FILE_H */
