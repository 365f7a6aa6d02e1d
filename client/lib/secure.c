/* secure.c - what a connection shows and what it wants to see: TLS credentials and a bearer token, both from files. */
#include <errno.h>
#include <fcntl.h>
#include <grpc/grpc_security.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#if __has_include(<grpc/credentials.h>)
#include <grpc/credentials.h> /* newer cores; grpc_security.h had it all before */
#endif

#include "client/lib/internal.h"

#define MAX_FILE_BYTES (1 << 20)
#define SCHEME         "Bearer "

/* The whole file as text, for free(). NULL: err says why. */
static char *read_text(const char *path, const char *field, struct dsa_error *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    char *text = malloc(MAX_FILE_BYTES + 1);
    size_t n = 0;
    ssize_t got = -1;

    if (fd >= 0 && text) {
        while (n < MAX_FILE_BYTES && (got = read(fd, text + n, MAX_FILE_BYTES - n)) > 0)
            n += (size_t)got;
    }
    if (got < 0 || n == 0 || n == MAX_FILE_BYTES) {
        dsa__fail(err, DSA_E_BAD_REQUEST, field, "%s cannot be read: %s", path,
                  got < 0 ? strerror(errno) : (n == 0 ? "it is empty" : "it is larger than 1 MiB"));
        free(text);
        text = NULL;
    } else {
        text[n] = '\0';
    }
    if (fd >= 0)
        close(fd);
    return text;
}

/* A path that is not given reads as no text. */
static bool read_optional(const char *path, const char *field, char **text_p, struct dsa_error *err)
{
    *text_p = NULL;
    if (!path || path[0] == '\0')
        return true;
    *text_p = read_text(path, field, err);
    return *text_p != NULL;
}

static dsa_status take_tls(struct dsa_client *client, const struct dsa_tls *tls, struct dsa_error *err)
{
    char *ca = NULL, *cert = NULL, *key = NULL;
    grpc_ssl_pem_key_cert_pair pair;

    if (!read_optional(tls->ca_file, "tls.ca_file", &ca, err)
        || !read_optional(tls->cert_file, "tls.cert_file", &cert, err)
        || !read_optional(tls->key_file, "tls.key_file", &key, err)) {
        free(ca);
        free(cert);
        return DSA_E_BAD_REQUEST;
    }
    if ((cert == NULL) == (key == NULL)) {
        pair = (grpc_ssl_pem_key_cert_pair){key, cert};
        client->credentials = grpc_ssl_credentials_create(ca, cert ? &pair : NULL, NULL, NULL);
    }
    if (!client->credentials)
        dsa__fail(err, DSA_E_BAD_REQUEST, "tls",
                  (cert == NULL) != (key == NULL) ? "cert_file and key_file need each other"
                                                  : "the files make no TLS credentials");
    free(ca);
    free(cert);
    if (key)
        memset(key, 0, strlen(key));
    free(key);
    return client->credentials ? DSA_OK : DSA_E_BAD_REQUEST;
}

static dsa_status take_token(struct dsa_client *client, const char *path, struct dsa_error *err)
{
    char *text = read_text(path, "token_file", err), *value;
    size_t n;

    if (!text)
        return DSA_E_BAD_REQUEST;
    n = strcspn(text, " \t\r\n"); /* the first line */
    value = n > 0 ? malloc(sizeof(SCHEME) + n) : NULL;
    if (value) {
        memcpy(value, SCHEME, sizeof(SCHEME) - 1);
        memcpy(value + sizeof(SCHEME) - 1, text, n);
        client->authorization.key = grpc_slice_from_static_string("authorization");
        client->authorization.value = grpc_slice_from_copied_buffer(value, sizeof(SCHEME) - 1 + n);
        client->n_authorization = 1;
    }
    free(value);
    free(text);
    return value ? DSA_OK : dsa__fail(err, DSA_E_BAD_REQUEST, "token_file", "%s begins with no token", path);
}

dsa_status dsa__secure_init(struct dsa_client *client, const char *target, const struct dsa_options *options,
                            struct dsa_error *err)
{
    dsa_status status = DSA_OK;

    if (options->tls && strncmp(target, "unix:", 5) == 0)
        return dsa__fail(err, DSA_E_BAD_REQUEST, "tls", "a unix socket speaks plain text");
    if (options->tls)
        status = take_tls(client, options->tls, err);
    else
        client->credentials = grpc_insecure_credentials_create();
    client->has_tls = options->tls != NULL;
    if (status == DSA_OK && options->tls && options->tls->server_name && options->tls->server_name[0] != '\0'
        && !(client->server_name = strdup(options->tls->server_name)))
        status = dsa__fail(err, DSA_E_NO_MEMORY, NULL, "no memory for a client");
    if (status == DSA_OK && options->token_file && options->token_file[0] != '\0')
        status = take_token(client, options->token_file, err);
    return status;
}

void dsa__secure_fini(struct dsa_client *client)
{
    if (client->credentials)
        grpc_channel_credentials_release(client->credentials);
    if (client->n_authorization > 0)
        grpc_slice_unref(client->authorization.value);
    free(client->server_name);
}
