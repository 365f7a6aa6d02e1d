#include "server/config_file.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <yaml.h>

#define PREFIX    "DSAD_"
#define MAX_KEYS  256
#define MAX_NAME  63
#define FILE_FLAG "--config"

/* ---- the environment ---------------------------------------------------------------------------- */

static const char *variable(char **environment, const char *name)
{
    size_t n = strlen(name);

    for (; *environment; environment++)
        if (strncmp(*environment, name, n) == 0 && (*environment)[n] == '=')
            return *environment + n + 1;
    return NULL;
}

static bool is_not_ours(const char *rest)
{
    return strncmp(rest, "CONFIG=", 7) == 0 || strncmp(rest, "SERVICE_", 8) == 0
           || (strncmp(rest, "PORT", 4) == 0 && (rest[4] == '=' || rest[4] == '_'));
}

dsa_status srv_config_read_environment(struct srv_config *config, char **environment, struct srv_err *err)
{
    for (; *environment; environment++) {
        const char *rest = *environment + strlen(PREFIX), *value;
        char name[MAX_NAME + 1], shown[MAX_NAME + 1];
        size_t n;
        dsa_status rc;

        if (strncmp(*environment, PREFIX, strlen(PREFIX)) != 0 || is_not_ours(rest))
            continue;
        n = strcspn(rest, "=");
        value = rest[n] == '=' ? rest + n + 1 : "";
        snprintf(shown, sizeof(shown), "%.*s", (int)(n + strlen(PREFIX)), *environment);
        if (n > MAX_NAME)
            return srv_fail(err, DSA_E_BAD_REQUEST, shown, "%s", value,
                            "no variable of dsad has so long a name");
        for (size_t i = 0; i < n; i++)
            name[i] = rest[i] == '_' ? '-' : (char)tolower((unsigned char)rest[i]);
        rc = srv_config_set(config, name, n, value, SRV_SOURCE_ENVIRONMENT, err);
        if (rc != DSA_OK && err)
            snprintf(err->field, sizeof(err->field), "%s", shown);
        if (rc != DSA_OK)
            return rc;
    }
    return DSA_OK;
}

/* ---- the file ------------------------------------------------------------------------------------ */

dsa_status srv_config_file_name(int argc, char **argv, char **environment, const char **path_p,
                                struct srv_err *err)
{
    const char *path = variable(environment, PREFIX "CONFIG");

    for (int i = 1; i < argc; i++) {
        if (strncmp(argv[i], FILE_FLAG "=", strlen(FILE_FLAG) + 1) == 0)
            path = argv[i] + strlen(FILE_FLAG) + 1;
        else if (strcmp(argv[i], FILE_FLAG) == 0 && i + 1 < argc)
            path = argv[++i];
        else if (strcmp(argv[i], FILE_FLAG) == 0)
            return srv_fail(err, DSA_E_BAD_REQUEST, "config", "%s", "", "needs a value");
    }
    *path_p = path && path[0] != '\0' ? path : NULL;
    return DSA_OK;
}

struct reader {
    struct srv_config *config;
    const char *path;
    struct srv_err *err;
    yaml_parser_t parser;
    yaml_event_t event;
    char key[MAX_NAME + 1];
    uint64_t n_keys;
    uint32_t seen[MAX_KEYS]; /* hashes of the keys so far */
};

static size_t line_of(const struct reader *r)
{
    return r->event.start_mark.line + 1;
}

static dsa_status refuse(struct reader *r, const char *what)
{
    return srv_fail(r->err, DSA_E_BAD_REQUEST, r->key[0] != '\0' ? r->key : "config", "%s", "",
                    "%s line %zu: %s", r->path, line_of(r), what);
}

static dsa_status next(struct reader *r)
{
    yaml_event_delete(&r->event);
    if (yaml_parser_parse(&r->parser, &r->event))
        return DSA_OK;
    memset(&r->event, 0, sizeof(r->event));
    return srv_fail(r->err, DSA_E_BAD_REQUEST, "config", "%s", "", "%s line %zu: not YAML: %s", r->path,
                    r->parser.problem_mark.line + 1,
                    r->parser.problem ? r->parser.problem : "cannot be read");
}

/* The value's text must not hold a zero byte: what is behind it would be lost. */
static bool is_whole(const yaml_event_t *event)
{
    return strlen((const char *)event->data.scalar.value) == event->data.scalar.length;
}

static uint32_t hash(const char *text)
{
    uint32_t h = 2166136261u;

    for (; *text; text++)
        h = (h ^ (unsigned char)*text) * 16777619u;
    return h;
}

/* Known keys have different hashes; an unknown one is refused anyway. */
static bool is_second(struct reader *r)
{
    uint32_t h = hash(r->key);

    for (uint64_t i = 0; i < r->n_keys; i++)
        if (r->seen[i] == h)
            return true;
    if (r->n_keys < MAX_KEYS)
        r->seen[r->n_keys++] = h;
    return false;
}

static dsa_status take_value(struct reader *r)
{
    const char *value;
    dsa_status rc;

    if (r->event.type != YAML_SCALAR_EVENT)
        return refuse(r, "a single value is wanted, no list, mapping or alias");
    value = (const char *)r->event.data.scalar.value;
    if (!is_whole(&r->event))
        return refuse(r, "the value holds a zero byte");
    if (is_second(r))
        return refuse(r, "the key is there twice");
    rc = srv_config_set(r->config, r->key, strlen(r->key), value, SRV_SOURCE_FILE, r->err);
    if (rc != DSA_OK && r->err) {
        char why[sizeof(r->err->text)];

        memcpy(why, r->err->text, sizeof(why));
        snprintf(r->err->text, sizeof(r->err->text), "%.60s line %zu: %.80s", r->path, line_of(r), why);
    }
    return rc;
}

static dsa_status take_mapping(struct reader *r)
{
    dsa_status rc;

    while ((rc = next(r)) == DSA_OK && r->event.type != YAML_MAPPING_END_EVENT) {
        r->key[0] = '\0';
        if (r->event.type != YAML_SCALAR_EVENT)
            return refuse(r, "a key is a name");
        if (r->event.data.scalar.length > MAX_NAME || !is_whole(&r->event))
            return refuse(r, "no key is so long");
        memcpy(r->key, r->event.data.scalar.value, r->event.data.scalar.length + 1);
        if ((rc = next(r)) != DSA_OK || (rc = take_value(r)) != DSA_OK)
            return rc;
    }
    r->key[0] = '\0';
    return rc;
}

/* stream, document, mapping and their ends; an empty file has no document. */
static dsa_status take_stream(struct reader *r)
{
    bool has_document = false;
    dsa_status rc;

    while ((rc = next(r)) == DSA_OK && r->event.type != YAML_STREAM_END_EVENT) {
        switch (r->event.type) {
        case YAML_STREAM_START_EVENT:
        case YAML_DOCUMENT_END_EVENT:
            break;
        case YAML_DOCUMENT_START_EVENT:
            if (has_document)
                return refuse(r, "a second document");
            has_document = true;
            break;
        case YAML_MAPPING_START_EVENT:
            if ((rc = take_mapping(r)) != DSA_OK)
                return rc;
            break;
        default:
            return refuse(r, "a mapping of keys to values is wanted");
        }
    }
    return rc;
}

dsa_status srv_config_read_file(struct srv_config *config, const char *path, struct srv_err *err)
{
    struct reader reader = {.config = config, .path = path, .err = err};
    FILE *file = fopen(path, "re");
    dsa_status rc;

    if (!file)
        return srv_fail(err, DSA_E_SYSTEM, "config", "%s", path, "cannot be read: %s", strerror(errno));
    if (!yaml_parser_initialize(&reader.parser)) {
        fclose(file);
        return srv_fail(err, DSA_E_NO_MEMORY, "config", "%s", path, "no memory for the parser");
    }
    yaml_parser_set_input_file(&reader.parser, file);
    rc = take_stream(&reader);
    yaml_event_delete(&reader.event);
    yaml_parser_delete(&reader.parser);
    fclose(file);
    return rc;
}

dsa_status srv_config_read(struct srv_config *config, int argc, char **argv, char **environment,
                           enum srv_config_action *action_p, struct srv_err *err)
{
    const char *path;
    dsa_status rc;

    srv_config_defaults(config);
    if ((rc = srv_config_file_name(argc, argv, environment, &path, err)) != DSA_OK
        || (path && (rc = srv_config_read_file(config, path, err)) != DSA_OK)
        || (rc = srv_config_read_environment(config, environment, err)) != DSA_OK)
        return rc;
    return srv_config_parse(config, argc, argv, action_p, err);
}
