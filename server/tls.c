#include "server/tls.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MAX_FILE_BYTES (1 << 20)
#define DIGEST_BYTES   32

enum { CERT, KEY, CLIENT_CA, N_FILES };

static const char *const flags[N_FILES] = {"tls-cert", "tls-key", "tls-client-ca"};

/* The contents of the files at one moment: what is checked is what is used. */
struct material {
    uint8_t *bytes[N_FILES];
    size_t n[N_FILES];
    uint8_t digest[DIGEST_BYTES];
};

struct srv_tls {
    char *paths[N_FILES]; /* CLIENT_CA: NULL = clients need no certificate */
    pthread_mutex_t lock; /* guards all below; nothing is called out to while it is held but OpenSSL */
    SSL_CTX *context;
    uint8_t digest[DIGEST_BYTES];
    int64_t expiry_s;
    uint64_t n_reloads, n_failures;
};

/* ---- reading the files --------------------------------------------------------------------------- */

static dsa_status fail_file(struct srv_err *err, const struct srv_tls *tls, int which, const char *what)
{
    unsigned long code = ERR_peek_last_error();
    const char *why = code != 0 ? ERR_reason_error_string(code) : NULL;

    ERR_clear_error();
    return srv_fail(err, DSA_E_BAD_REQUEST, flags[which], "%s", tls->paths[which], "%s%s%s", what,
                    why ? ": " : "", why ? why : "");
}

static dsa_status read_file(const struct srv_tls *tls, int which, struct material *m, struct srv_err *err)
{
    int fd = open(tls->paths[which], O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat st;
    ssize_t got;

    if (fd < 0)
        return srv_fail(err, DSA_E_BAD_REQUEST, flags[which], "%s", tls->paths[which], "cannot be read: %s",
                        strerror(errno));
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode) || st.st_size > MAX_FILE_BYTES) {
        close(fd);
        return fail_file(err, tls, which, "not a file of at most 1 MiB");
    }
    m->bytes[which] = malloc(MAX_FILE_BYTES + 1);
    while (m->bytes[which]
           && (got = read(fd, m->bytes[which] + m->n[which], MAX_FILE_BYTES + 1 - m->n[which])) > 0)
        m->n[which] += (size_t)got;
    close(fd);
    if (!m->bytes[which])
        return srv_fail(err, DSA_E_NO_MEMORY, flags[which], "%s", tls->paths[which], "no memory");
    if (m->n[which] == 0 || m->n[which] > MAX_FILE_BYTES)
        return fail_file(err, tls, which, m->n[which] == 0 ? "the file is empty" : "more than 1 MiB");
    return DSA_OK;
}

static void material_fini(struct material *m)
{
    for (int i = 0; i < N_FILES; i++) {
        if (i == KEY && m->bytes[i])
            OPENSSL_cleanse(m->bytes[i], m->n[i]);
        free(m->bytes[i]);
    }
}

static bool digest_all(struct material *m)
{
    EVP_MD_CTX *md = EVP_MD_CTX_new();
    bool is_ok = md && EVP_DigestInit_ex(md, EVP_sha256(), NULL) == 1;

    for (int i = 0; is_ok && i < N_FILES; i++)
        is_ok = EVP_DigestUpdate(md, &m->n[i], sizeof(m->n[i])) == 1
                && EVP_DigestUpdate(md, m->bytes[i], m->n[i]) == 1;
    is_ok = is_ok && EVP_DigestFinal_ex(md, m->digest, NULL) == 1;
    EVP_MD_CTX_free(md);
    return is_ok;
}

static dsa_status read_all(const struct srv_tls *tls, struct material *m, struct srv_err *err)
{
    dsa_status rc = DSA_OK;

    memset(m, 0, sizeof(*m));
    for (int i = 0; i < N_FILES && rc == DSA_OK; i++)
        if (tls->paths[i])
            rc = read_file(tls, i, m, err);
    if (rc == DSA_OK && !digest_all(m))
        rc = srv_fail(err, DSA_E_NO_MEMORY, "tls-cert", "%s", tls->paths[CERT], "no memory");
    return rc;
}

/* ---- a context from them ---------------------------------------------------------------------------- */

static int no_password(char *text, int size, int is_writing, void *arg)
{
    (void)text;
    (void)size;
    (void)is_writing;
    (void)arg;
    return -1; /* OpenSSL would ask at the terminal */
}

static BIO *reader_of(const struct material *m, int which)
{
    return BIO_new_mem_buf(m->bytes[which], (int)m->n[which]);
}

static int64_t expiry_of(const X509 *cert)
{
    struct tm tm;

    return ASN1_TIME_to_tm(X509_get0_notAfter(cert), &tm) == 1 ? (int64_t)timegm(&tm) : 0;
}

/* The first certificate is the server's own, the others lead to its authority. */
static dsa_status use_chain(const struct srv_tls *tls, SSL_CTX *context, const struct material *m,
                            int64_t *expiry_s_p, struct srv_err *err)
{
    BIO *bio = reader_of(m, CERT);
    X509 *cert = PEM_read_bio_X509_AUX(bio, NULL, no_password, NULL);
    dsa_status rc = DSA_OK;

    if (!cert || SSL_CTX_use_certificate(context, cert) != 1)
        rc = fail_file(err, tls, CERT, "no usable certificate in PEM");
    else if ((*expiry_s_p = expiry_of(cert)) <= (int64_t)time(NULL))
        rc = fail_file(err, tls, CERT, "the certificate has expired");
    X509_free(cert);
    while (rc == DSA_OK && (cert = PEM_read_bio_X509(bio, NULL, no_password, NULL)) != NULL)
        if (SSL_CTX_add0_chain_cert(context, cert) != 1) {
            X509_free(cert);
            rc = fail_file(err, tls, CERT, "a certificate of the chain cannot be used");
        }
    ERR_clear_error(); /* the end of the file is one, too */
    BIO_free(bio);
    return rc;
}

static dsa_status use_key(const struct srv_tls *tls, SSL_CTX *context, const struct material *m,
                          struct srv_err *err)
{
    BIO *bio = reader_of(m, KEY);
    EVP_PKEY *key = PEM_read_bio_PrivateKey(bio, NULL, no_password, NULL);
    dsa_status rc = DSA_OK;

    if (!key)
        rc = fail_file(err, tls, KEY, "no key in PEM that can be read without a password");
    else if (SSL_CTX_use_PrivateKey(context, key) != 1 || SSL_CTX_check_private_key(context) != 1)
        rc = fail_file(err, tls, KEY, "not the key of the certificate in tls-cert");
    EVP_PKEY_free(key);
    BIO_free(bio);
    return rc;
}

static dsa_status use_client_ca(const struct srv_tls *tls, SSL_CTX *context, const struct material *m,
                                struct srv_err *err)
{
    BIO *bio = reader_of(m, CLIENT_CA);
    X509_STORE *store = SSL_CTX_get_cert_store(context);
    dsa_status rc = DSA_OK;
    unsigned n = 0;
    X509 *cert;

    while (rc == DSA_OK && (cert = PEM_read_bio_X509(bio, NULL, no_password, NULL)) != NULL) {
        if (X509_STORE_add_cert(store, cert) != 1 || SSL_CTX_add_client_CA(context, cert) != 1)
            rc = fail_file(err, tls, CLIENT_CA, "a certificate cannot be used");
        X509_free(cert);
        n++;
    }
    if (rc == DSA_OK && n == 0)
        rc = fail_file(err, tls, CLIENT_CA, "no certificate in PEM");
    ERR_clear_error();
    BIO_free(bio);
    SSL_CTX_set_verify(context, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, NULL);
    return rc;
}

/* Without the extension OpenSSL would not ask on_alpn, and serve whatever comes. */
static int on_client_hello(SSL *ssl, int *alert_p, void *arg)
{
    const unsigned char *bytes;
    size_t n;

    (void)arg;
    if (SSL_client_hello_get0_ext(ssl, TLSEXT_TYPE_application_layer_protocol_negotiation, &bytes, &n) == 1)
        return SSL_CLIENT_HELLO_SUCCESS;
    *alert_p = SSL_AD_NO_APPLICATION_PROTOCOL;
    return SSL_CLIENT_HELLO_ERROR;
}

static int on_alpn(SSL *ssl, const unsigned char **chosen_p, unsigned char *n_chosen_p,
                   const unsigned char *offered, unsigned n_offered, void *arg)
{
    static const unsigned char h2[] = {2, 'h', '2'};
    unsigned char *chosen;

    (void)ssl;
    (void)arg;
    if (SSL_select_next_proto(&chosen, n_chosen_p, h2, sizeof(h2), offered, n_offered)
        != OPENSSL_NPN_NEGOTIATED)
        return SSL_TLSEXT_ERR_ALERT_FATAL;
    *chosen_p = chosen;
    return SSL_TLSEXT_ERR_OK;
}

static SSL_CTX *new_context(void)
{
    SSL_CTX *context = SSL_CTX_new(TLS_server_method());

    if (!context)
        return NULL;
    SSL_CTX_set_min_proto_version(context, TLS1_2_VERSION);
    SSL_CTX_set_options(context, SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION | SSL_OP_NO_TICKET
                                     | SSL_OP_CIPHER_SERVER_PREFERENCE
                                     | SSL_OP_IGNORE_UNEXPECTED_EOF /* HTTP/2 has ends of its own */);
    SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER
                                  | SSL_MODE_RELEASE_BUFFERS);
    SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
    SSL_CTX_set_num_tickets(context, 0);
    SSL_CTX_set_client_hello_cb(context, on_client_hello, NULL);
    SSL_CTX_set_alpn_select_cb(context, on_alpn, NULL);
    if (SSL_CTX_set_cipher_list(context, "ECDHE+AESGCM:ECDHE+CHACHA20") == 1)
        return context;
    SSL_CTX_free(context);
    return NULL;
}

static dsa_status build(const struct srv_tls *tls, const struct material *m, SSL_CTX **context_p,
                        int64_t *expiry_s_p, struct srv_err *err)
{
    SSL_CTX *context;
    dsa_status rc;

    ERR_clear_error();
    context = new_context();
    if (!context)
        return srv_fail(err, DSA_E_NO_MEMORY, "tls-cert", "%s", tls->paths[CERT], "no memory for TLS");
    if ((rc = use_chain(tls, context, m, expiry_s_p, err)) != DSA_OK
        || (rc = use_key(tls, context, m, err)) != DSA_OK
        || (tls->paths[CLIENT_CA] && (rc = use_client_ca(tls, context, m, err)) != DSA_OK)) {
        SSL_CTX_free(context);
        return rc;
    }
    *context_p = context;
    return DSA_OK;
}

/* ---- life --------------------------------------------------------------------------------------------- */

static bool copy_paths(struct srv_tls *tls, const struct srv_tls_files *files)
{
    tls->paths[CERT] = strdup(files->cert);
    tls->paths[KEY] = strdup(files->key);
    if (files->client_ca && files->client_ca[0] != '\0'
        && !(tls->paths[CLIENT_CA] = strdup(files->client_ca)))
        return false;
    return tls->paths[CERT] && tls->paths[KEY];
}

dsa_status srv_tls_create(const struct srv_tls_files *files, struct srv_tls **tls_p, struct srv_err *err)
{
    struct srv_tls *tls = calloc(1, sizeof(*tls));
    struct material m;
    dsa_status rc;

    if (!tls)
        return srv_fail(err, DSA_E_NO_MEMORY, "tls-cert", "%s", files->cert, "no memory");
    pthread_mutex_init(&tls->lock, NULL);
    if (!copy_paths(tls, files)) {
        srv_tls_destroy(tls);
        return srv_fail(err, DSA_E_NO_MEMORY, "tls-cert", "%s", files->cert, "no memory");
    }
    rc = read_all(tls, &m, err);
    if (rc == DSA_OK)
        rc = build(tls, &m, &tls->context, &tls->expiry_s, err);
    memcpy(tls->digest, m.digest, sizeof(tls->digest));
    material_fini(&m);
    if (rc != DSA_OK) {
        srv_tls_destroy(tls);
        return rc;
    }
    *tls_p = tls;
    return DSA_OK;
}

void srv_tls_destroy(struct srv_tls *tls)
{
    if (!tls)
        return;
    SSL_CTX_free(tls->context);
    for (int i = 0; i < N_FILES; i++)
        free(tls->paths[i]);
    pthread_mutex_destroy(&tls->lock);
    free(tls);
}

/* Lock held. Takes the context. */
static void adopt(struct srv_tls *tls, SSL_CTX *context, const struct material *m, int64_t expiry_s)
{
    SSL_CTX_free(tls->context); /* handshakes under way hold it */
    tls->context = context;
    tls->expiry_s = expiry_s;
    memcpy(tls->digest, m->digest, sizeof(tls->digest));
    tls->n_reloads++;
}

static dsa_status reload(struct srv_tls *tls, bool only_changed, bool *is_new_p, struct srv_err *err)
{
    SSL_CTX *context = NULL;
    int64_t expiry_s = 0;
    struct material m;
    dsa_status rc;

    pthread_mutex_lock(&tls->lock);
    rc = read_all(tls, &m, err);
    *is_new_p = rc == DSA_OK && memcmp(m.digest, tls->digest, sizeof(m.digest)) != 0;
    if (rc == DSA_OK && (*is_new_p || !only_changed)
        && (rc = build(tls, &m, &context, &expiry_s, err)) == DSA_OK)
        adopt(tls, context, &m, expiry_s);
    if (rc != DSA_OK)
        tls->n_failures++;
    pthread_mutex_unlock(&tls->lock);
    material_fini(&m);
    return rc;
}

dsa_status srv_tls_reload(struct srv_tls *tls, struct srv_err *err)
{
    bool is_new;

    return reload(tls, false, &is_new, err);
}

dsa_status srv_tls_reload_if_changed(struct srv_tls *tls, bool *is_new_p, struct srv_err *err)
{
    return reload(tls, true, is_new_p, err);
}

SSL_CTX *srv_tls_take_context(struct srv_tls *tls)
{
    SSL_CTX *context;

    pthread_mutex_lock(&tls->lock);
    context = tls->context;
    SSL_CTX_up_ref(context);
    pthread_mutex_unlock(&tls->lock);
    return context;
}

int64_t srv_tls_expiry_s(struct srv_tls *tls)
{
    int64_t expiry_s;

    pthread_mutex_lock(&tls->lock);
    expiry_s = tls->expiry_s;
    pthread_mutex_unlock(&tls->lock);
    return expiry_s;
}

static uint64_t read_counter(struct srv_tls *tls, const uint64_t *counter)
{
    uint64_t n;

    pthread_mutex_lock(&tls->lock);
    n = *counter;
    pthread_mutex_unlock(&tls->lock);
    return n;
}

uint64_t srv_tls_reloads(struct srv_tls *tls)
{
    return read_counter(tls, &tls->n_reloads);
}

uint64_t srv_tls_reload_failures(struct srv_tls *tls)
{
    return read_counter(tls, &tls->n_failures);
}
