/* TLS between a client and gRPC's end of a socket pair: every byte both ways, whoever is slow, and whoever leaves first; the door.
 * The client is OpenSSL in blocking mode on the test's own thread; the service thread hands out plain ends. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kit.h"
#include "server/access.h"
#include "server/tls.h"
#include "server/tls_relay.h"

#define HANDSHAKE_US 5000000

static struct kit_loop k;
static struct srv_tls *tls;
static struct srv_tls_relay *relay;
static char *cert_path, *key_path;

/* The plain end of the connection that was made last; main reads it after it took `ready`. */
static atomic_int plain_fd;
static sem_t ready;

static void on_ready(void *arg, int fd)
{
    ck_assert_ptr_eq(arg, &k);
    atomic_store(&plain_fd, fd);
    sem_post(&ready);
}

/* ---- a certificate of one's own ------------------------------------------------------------------- */

static void write_pem(const char *path, X509 *cert, EVP_PKEY *key)
{
    FILE *file = fopen(path, "w");

    ck_assert_ptr_nonnull(file);
    ck_assert_int_eq(
        cert ? PEM_write_X509(file, cert) : PEM_write_PrivateKey(file, key, NULL, NULL, 0, NULL, NULL), 1);
    fclose(file);
}

/* Valid from an hour ago, for so many seconds from now. Returns the serial number. */
static long make_certificate(long seconds)
{
    static long serial = 100;
    EVP_PKEY *key = EVP_EC_gen("P-256");
    X509 *cert = X509_new();
    X509_NAME *name;

    ck_assert_ptr_nonnull(key);
    ck_assert_ptr_nonnull(cert);
    X509_set_version(cert, 2);
    ASN1_INTEGER_set(X509_get_serialNumber(cert), ++serial);
    X509_gmtime_adj(X509_getm_notBefore(cert), -3600);
    X509_gmtime_adj(X509_getm_notAfter(cert), seconds);
    X509_set_pubkey(cert, key);
    name = X509_get_subject_name(cert);
    X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC, (const unsigned char *)"dsad", -1, -1, 0);
    X509_set_issuer_name(cert, name);
    ck_assert_int_gt(X509_sign(cert, key, EVP_sha256()), 0);
    write_pem(cert_path, cert, NULL);
    write_pem(key_path, NULL, key);
    X509_free(cert);
    EVP_PKEY_free(key);
    return serial;
}

static struct srv_tls_files files(void)
{
    return (struct srv_tls_files){cert_path, key_path, NULL};
}

static void open_with(uint64_t handshake_us)
{
    struct srv_tls_files pair;
    struct srv_tls_relay_config config = {.handshake_timeout_us = handshake_us, .ready = on_ready, .arg = &k};
    struct srv_err err = {0};

    signal(SIGPIPE, SIG_IGN);
    kit_dir_make();
    cert_path = kit_path("cert.pem");
    key_path = kit_path("key.pem");
    make_certificate(86400);
    pair = files();
    sem_init(&ready, 0, 0);
    kit_loop_open(&k, 0);
    KIT_OK(srv_tls_create(&pair, &tls, &err), &err);
    config.tls = tls;
    KIT_OK(srv_tls_relay_start(k.loop, &config, &relay, &err), &err);
    kit_loop_start(&k);
}

static void open_all(void)
{
    open_with(HANDSHAKE_US);
}

static void open_impatient(void)
{
    open_with(50000);
}

static void close_all(void)
{
    kit_loop_stop(&k);
    srv_tls_relay_stop(relay);
    kit_loop_close(&k);
    srv_tls_destroy(tls);
    free(cert_path);
    free(key_path);
    kit_dir_remove();
}

/* ---- a client ------------------------------------------------------------------------------------------ */

struct client {
    SSL_CTX *context;
    SSL *ssl;
    int fd;    /* its TCP socket, blocking */
    int plain; /* gRPC's end, blocking here */
};

static void accept_there(void *arg)
{
    srv_tls_relay_accept(relay, *(int *)arg);
}

/* A TCP connection whose other end the relay has. */
static int connect_tcp(void)
{
    struct sockaddr_in addr = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof(addr);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0),
        fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int accepted;

    ck_assert_int_eq(bind(listener, (struct sockaddr *)&addr, sizeof(addr)), 0);
    ck_assert_int_eq(listen(listener, 1), 0);
    ck_assert_int_eq(getsockname(listener, (struct sockaddr *)&addr, &n), 0);
    ck_assert_int_eq(connect(fd, (struct sockaddr *)&addr, sizeof(addr)), 0);
    accepted = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    ck_assert_int_ge(accepted, 0);
    close(listener);
    kit_loop_call(&k, accept_there, &accepted);
    return fd;
}

static struct client connect_tls(void)
{
    static const unsigned char h2[] = {2, 'h', '2'};
    struct client client = {.context = SSL_CTX_new(TLS_client_method()), .fd = connect_tcp()};

    SSL_CTX_set_options(client.context, SSL_OP_IGNORE_UNEXPECTED_EOF);
    client.ssl = SSL_new(client.context);
    ck_assert_int_eq(SSL_set_alpn_protos(client.ssl, h2, sizeof(h2)), 0);
    ck_assert_int_eq(SSL_set_fd(client.ssl, client.fd), 1);
    ck_assert_int_eq(SSL_connect(client.ssl), 1);
    ck_assert(kit_wait(&ready));
    client.plain = atomic_load(&plain_fd);
    ck_assert_int_eq(fcntl(client.plain, F_SETFL, 0), 0);
    return client;
}

static void client_close(struct client *client)
{
    SSL_free(client->ssl);
    SSL_CTX_free(client->context);
    close(client->fd);
    if (client->plain >= 0)
        close(client->plain);
}

static uint64_t n_open(void)
{
    return srv_tls_relay_counts(relay).n_open;
}

/* The relay closes on its own thread: looked at until it has. */
static void expect_none_open(void)
{
    for (int i = 0; i < KIT_PATIENCE_S * 1000 && n_open() > 0; i++)
        poll(NULL, 0, 1); /* the pace of looking; the loop ends with what it waits for */
    ck_assert_uint_eq(n_open(), 0);
}

static uint8_t byte_at(size_t at)
{
    return (uint8_t)(at * 131 + (at >> 8) * 31 + (at >> 16));
}

static void fill(uint8_t *bytes, size_t n, size_t at)
{
    for (size_t i = 0; i < n; i++)
        bytes[i] = byte_at(at + i);
}

static void expect_bytes(const uint8_t *bytes, size_t n, size_t at)
{
    for (size_t i = 0; i < n; i++)
        KIT_EXPECT(bytes[i] == byte_at(at + i), "byte %zu differs", at + i);
}

/* ---- bytes ---------------------------------------------------------------------------------------------- */

struct stream {
    struct client *client;
    size_t n;
    bool is_up;
};

/* A writer of its own, since nobody can be sure to get all of it rid at once. */
static void *write_all(void *arg)
{
    const struct stream *stream = arg;
    uint8_t *bytes = malloc(stream->n + 1);

    fill(bytes, stream->n, 0);
    for (size_t at = 0; at < stream->n;) {
        int n = stream->is_up ? SSL_write(stream->client->ssl, bytes + at, (int)(stream->n - at))
                              : (int)write(stream->client->plain, bytes + at, stream->n - at);

        if (n <= 0)
            break; /* the reader will miss it */
        at += (size_t)n;
    }
    free(bytes);
    return NULL;
}

static void carry(struct client *client, size_t n, bool is_up)
{
    struct stream stream = {client, n, is_up};
    uint8_t bytes[5000];
    pthread_t writer;
    size_t at = 0;

    ck_assert_int_eq(pthread_create(&writer, NULL, write_all, &stream), 0);
    while (at < n) {
        int got = is_up ? (int)read(client->plain, bytes, sizeof(bytes))
                        : SSL_read(client->ssl, bytes, sizeof(bytes));

        ck_assert_msg(got > 0, "%s: %zu of %zu bytes came", is_up ? "up" : "down", at, n);
        expect_bytes(bytes, (size_t)got, at);
        at += (size_t)got;
    }
    pthread_join(writer, NULL);
}

START_TEST(bytes_of_every_size_go_both_ways)
{
    static const size_t sizes[] = {1, 2, 100, 16383, 16384, 16385, 32768, 65537, 1 << 20, 5000001};
    struct client client = connect_tls();

    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        carry(&client, sizes[i], true);
        carry(&client, sizes[i], false);
    }
    client_close(&client);
    expect_none_open();
    ck_assert_uint_eq(srv_tls_relay_counts(relay).n_handshakes, 1);
}
END_TEST

START_TEST(many_connections_do_not_mix)
{
    struct client clients[8];

    for (int i = 0; i < 8; i++)
        clients[i] = connect_tls();
    ck_assert_uint_eq(n_open(), 8);
    for (int i = 0; i < 8; i++)
        carry(&clients[i], 1000 + (size_t)i, i % 2 == 0);
    for (int i = 0; i < 8; i++)
        client_close(&clients[i]);
    expect_none_open();
}
END_TEST

/* ---- whoever does not read ---------------------------------------------------------------------------------- */

/* Writes until nothing moves any more. The pause after which that is believed is what the test is about: a relay without
 * back-pressure goes on taking, and the limit ends the test. */
static size_t write_until_stuck(int fd, size_t limit)
{
    static const uint8_t bytes[65536];
    struct pollfd ready_fd = {.fd = fd, .events = POLLOUT};
    size_t n = 0;

    fcntl(fd, F_SETFL, O_NONBLOCK);
    while (n < limit) {
        ssize_t sent = write(fd, bytes, sizeof(bytes));

        if (sent > 0)
            n += (size_t)sent;
        else if (poll(&ready_fd, 1, 300) == 0)
            break;
    }
    fcntl(fd, F_SETFL, 0);
    return n;
}

#define STUCK_LIMIT ((size_t)64 << 20)

START_TEST(a_client_that_does_not_read_stops_grpc)
{
    struct client client = connect_tls();
    size_t n = write_until_stuck(client.plain, STUCK_LIMIT), at = 0;
    uint8_t bytes[16384];
    int got;

    ck_assert_uint_lt(n, STUCK_LIMIT); /* the sockets' buffers and one of ours */
    shutdown(client.plain, SHUT_WR);
    while ((got = SSL_read(client.ssl, bytes, sizeof(bytes))) > 0)
        at += (size_t)got;
    ck_assert_uint_eq(at, n);
    ck_assert_int_eq(SSL_get_error(client.ssl, got), SSL_ERROR_ZERO_RETURN); /* and a goodbye */
    client_close(&client);
    expect_none_open();
}
END_TEST

START_TEST(grpc_that_does_not_read_stops_a_client)
{
    static const uint8_t bytes[65536];
    struct client client = connect_tls();
    struct pollfd fd = {.fd = client.fd, .events = POLLOUT};
    size_t n = 0, at = 0;
    int sent;

    SSL_set_mode(client.ssl, SSL_MODE_ENABLE_PARTIAL_WRITE);
    fcntl(client.fd, F_SETFL, O_NONBLOCK);
    while (n < STUCK_LIMIT) {
        sent = SSL_write(client.ssl, bytes, sizeof(bytes));
        if (sent > 0)
            n += (size_t)sent;
        else if (poll(&fd, 1, 300) == 0)
            break;
    }
    ck_assert_uint_lt(n, STUCK_LIMIT);
    while (at < n) {
        uint8_t some[65536];
        ssize_t got = read(client.plain, some, sizeof(some));

        ck_assert_int_gt(got, 0);
        at += (size_t)got;
    }
    client_close(&client);
    expect_none_open();
}
END_TEST

/* gRPC has closed, and the client takes nothing: it is let go after a while. */
START_TEST(a_stuck_client_is_dropped_when_grpc_has_closed)
{
    struct client client = connect_tls();

    write_until_stuck(client.plain, STUCK_LIMIT);
    close(client.plain);
    client.plain = -1;
    expect_none_open();
    client_close(&client);
}
END_TEST

/* ---- ends ------------------------------------------------------------------------------------------------------ */

START_TEST(a_clients_goodbye_reaches_grpc)
{
    struct client client = connect_tls();
    uint8_t bytes[16];

    ck_assert_int_eq(SSL_write(client.ssl, "last", 4), 4);
    SSL_shutdown(client.ssl);
    ck_assert_int_eq(read(client.plain, bytes, 4), 4);
    ck_assert_int_eq(read(client.plain, bytes, 4), 0);
    ck_assert_int_eq(write(client.plain, "answer", 6), 6); /* half closed: the other way goes on */
    close(client.plain);
    client.plain = -1;
    ck_assert_int_eq(SSL_read(client.ssl, bytes, sizeof(bytes)), 6);
    ck_assert_int_le(SSL_read(client.ssl, bytes, sizeof(bytes)), 0);
    client_close(&client);
    expect_none_open();
}
END_TEST

START_TEST(an_end_without_goodbye_reaches_grpc)
{
    struct client client = connect_tls();
    uint8_t byte;

    close(client.fd);
    ck_assert_int_eq(read(client.plain, &byte, 1), 0);
    client.fd = -1;
    close(client.plain);
    client.plain = -1;
    expect_none_open();
    client_close(&client);
}
END_TEST

START_TEST(a_reset_reaches_grpc)
{
    struct linger linger = {1, 0};
    struct client client = connect_tls();
    uint8_t byte;

    setsockopt(client.fd, SOL_SOCKET, SO_LINGER, &linger, sizeof(linger));
    close(client.fd);
    client.fd = -1;
    ck_assert_int_le(read(client.plain, &byte, 1), 0);
    expect_none_open();
    client_close(&client);
}
END_TEST

START_TEST(what_grpc_wrote_before_it_closed_arrives)
{
    struct client client = connect_tls();
    uint8_t bytes[100000];
    size_t at = 0;
    int got;

    ck_assert_int_eq(SSL_write(client.ssl, bytes, sizeof(bytes)),
                     (int)sizeof(bytes)); /* never read by gRPC */
    fill(bytes, sizeof(bytes), 0);
    ck_assert_int_eq(write(client.plain, bytes, sizeof(bytes)), (ssize_t)sizeof(bytes));
    close(client.plain);
    client.plain = -1;
    memset(bytes, 0, sizeof(bytes));
    while ((got = SSL_read(client.ssl, bytes + at, (int)(sizeof(bytes) - at))) > 0)
        at += (size_t)got;
    ck_assert_uint_eq(at, sizeof(bytes));
    expect_bytes(bytes, sizeof(bytes), 0);
    client_close(&client);
    expect_none_open();
}
END_TEST

/* Stopping carries over what is still on the way, and leaves no descriptor. */
START_TEST(stopping_delivers_the_last_words)
{
    struct client client = connect_tls();
    uint8_t bytes[16];

    ck_assert_int_eq(write(client.plain, "goodbye", 7), 7);
    close(client.plain);
    client.plain = -1;
    kit_loop_stop(&k);
    srv_tls_relay_stop(relay);
    relay = NULL;
    ck_assert_int_eq(SSL_read(client.ssl, bytes, sizeof(bytes)), 7);
    client_close(&client);
    kit_loop_start(&k);
}
END_TEST

START_TEST(stopping_does_not_wait_for_a_stuck_client)
{
    struct client client = connect_tls();

    write_until_stuck(client.plain, STUCK_LIMIT);
    kit_loop_stop(&k);
    srv_tls_relay_stop(relay); /* the test's limit of time judges */
    relay = NULL;
    client_close(&client);
    kit_loop_start(&k);
}
END_TEST

/* ---- handshakes --------------------------------------------------------------------------------------------------- */

START_TEST(garbage_is_refused)
{
    static const char text[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    int fd = connect_tcp();
    uint8_t byte;

    ck_assert_int_eq(write(fd, text, sizeof(text) - 1), (ssize_t)sizeof(text) - 1);
    ck_assert_int_eq(read(fd, &byte, 1), 0); /* closed, and not reset: what was said before would arrive */
    close(fd);
    expect_none_open();
    ck_assert_uint_eq(srv_tls_relay_counts(relay).n_refused, 1);
}
END_TEST

START_TEST(a_client_that_leaves_at_once_is_counted_as_gone)
{
    for (int i = 0; i < 20; i++)
        close(connect_tcp());
    expect_none_open();
    ck_assert_uint_eq(srv_tls_relay_counts(relay).n_gone, 20);
    ck_assert_uint_eq(srv_tls_relay_counts(relay).n_refused, 0);
}
END_TEST

START_TEST(a_silent_client_is_dropped)
{
    int before = kit_n_fds(), fd = connect_tcp();
    uint8_t byte;

    ck_assert_int_le(read(fd, &byte, 1), 0);
    close(fd);
    expect_none_open();
    ck_assert_uint_eq(srv_tls_relay_counts(relay).n_timeouts, 1);
    ck_assert_int_eq(kit_n_fds(), before);
}
END_TEST

/* ---- the certificate ------------------------------------------------------------------------------------------------ */

static long serial_seen(const struct client *client)
{
    X509 *cert = SSL_get1_peer_certificate(client->ssl);
    long serial = ASN1_INTEGER_get(X509_get0_serialNumber(cert));

    X509_free(cert);
    return serial;
}

START_TEST(a_new_certificate_is_for_new_connections)
{
    struct client old = connect_tls(), new;
    struct srv_err err = {0};
    long serial = serial_seen(&old), next;
    int64_t expiry_s = srv_tls_expiry_s(tls);
    bool is_new = true;

    KIT_OK(srv_tls_reload_if_changed(tls, &is_new, &err), &err);
    ck_assert(!is_new);
    next = make_certificate(2 * 86400);
    KIT_OK(srv_tls_reload_if_changed(tls, &is_new, &err), &err);
    ck_assert(is_new);
    new = connect_tls();
    ck_assert_int_eq(serial_seen(&new), next);
    ck_assert_int_ne(serial, next);
    carry(&old, 100000, true);
    carry(&old, 100000, false);
    ck_assert_int_ge(srv_tls_expiry_s(tls), expiry_s + 86000);
    ck_assert_uint_eq(srv_tls_reloads(tls), 1);
    ck_assert_uint_eq(srv_tls_reload_failures(tls), 0);
    client_close(&old);
    client_close(&new);
}
END_TEST

START_TEST(a_bad_file_keeps_the_old_certificate)
{
    struct srv_err err = {0};
    struct client client;
    long serial;

    client = connect_tls();
    serial = serial_seen(&client);
    client_close(&client);
    make_certificate(-10); /* has expired */
    ck_assert_int_eq(srv_tls_reload(tls, &err), DSA_E_BAD_REQUEST);
    ck_assert_str_eq(err.field, "tls-cert");
    ck_assert_ptr_nonnull(strstr(err.text, "expired"));
    make_certificate(86400);
    ck_assert_int_eq(truncate(key_path, 10), 0);
    ck_assert_int_eq(srv_tls_reload(tls, &err), DSA_E_BAD_REQUEST);
    ck_assert_str_eq(err.field, "tls-key");
    unlink(cert_path);
    ck_assert_int_eq(srv_tls_reload(tls, &err), DSA_E_BAD_REQUEST);
    ck_assert_str_eq(err.field, "tls-cert");
    ck_assert_uint_eq(srv_tls_reload_failures(tls), 3);
    client = connect_tls();
    ck_assert_int_eq(serial_seen(&client), serial);
    client_close(&client);
}
END_TEST

/* ---- the door --------------------------------------------------------------------------------------------------------- */

#define GOOD_TOKEN  "abcdefghijklmnop"
#define OTHER_TOKEN "ABCDEFGHIJKLMNOP-._~+/=09"
#define DATA        "/dsa.v1.SparseAttention/GetStats"
#define DRAIN       "/dsa.v1.SparseAttention/Drain"
#define HEALTH      "/grpc.health.v1.Health/Check"
#define REFLECTION  "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"

static struct srv_access *door;
static char *token_path;

static void write_tokens(const char *text, mode_t mode)
{
    FILE *file = fopen(token_path, "w");

    ck_assert_ptr_nonnull(file);
    ck_assert_int_ge(fputs(text, file), 0);
    fclose(file);
    ck_assert_int_eq(chmod(token_path, mode), 0);
}

static void open_dir(void)
{
    kit_dir_make();
    token_path = kit_path("tokens");
}

static void close_dir(void)
{
    srv_access_destroy(door);
    door = NULL;
    free(token_path);
    kit_dir_remove();
}

static dsa_status open_door(bool has_tokens, bool admin_anywhere, struct srv_err *err)
{
    struct srv_access_config config = {has_tokens ? token_path : "", admin_anywhere};

    srv_access_destroy(door);
    door = NULL;
    memset(err, 0, sizeof(*err));
    return srv_access_create(&config, &door, err);
}

static enum srv_access_reason decide(enum rpc_origin origin, const char *path, const char *authorization)
{
    return srv_access_decide(door, origin, path, authorization, authorization ? strlen(authorization) : 0);
}

/* What a call comes to: without and with tokens, and with a good one shown; each with admin unix and any. */
static const struct {
    const char *path;
    enum rpc_origin origin;
    enum srv_access_reason open[2], no_token[2], good[2];
} door_rows[] = {
    {DATA, RPC_ORIGIN_UNIX, {0, 0}, {0, 0}, {0, 0}},
    {DRAIN, RPC_ORIGIN_UNIX, {0, 0}, {0, 0}, {0, 0}},
    {HEALTH, RPC_ORIGIN_UNIX, {0, 0}, {0, 0}, {0, 0}},
    {DATA, RPC_ORIGIN_TCP, {0, 0}, {SRV_ACCESS_NO_TOKEN, SRV_ACCESS_NO_TOKEN}, {0, 0}},
    {DATA, RPC_ORIGIN_TLS, {0, 0}, {SRV_ACCESS_NO_TOKEN, SRV_ACCESS_NO_TOKEN}, {0, 0}},
    {DRAIN,
     RPC_ORIGIN_TCP,
     {SRV_ACCESS_ADMIN, 0},
     {SRV_ACCESS_NO_TOKEN, SRV_ACCESS_NO_TOKEN},
     {SRV_ACCESS_ADMIN, 0}},
    {DRAIN,
     RPC_ORIGIN_TLS,
     {SRV_ACCESS_ADMIN, 0},
     {SRV_ACCESS_NO_TOKEN, SRV_ACCESS_NO_TOKEN},
     {SRV_ACCESS_ADMIN, 0}},
    {HEALTH, RPC_ORIGIN_TCP, {0, 0}, {0, 0}, {0, 0}},
    {HEALTH, RPC_ORIGIN_TLS, {0, 0}, {0, 0}, {0, 0}},
    {REFLECTION, RPC_ORIGIN_TLS, {0, 0}, {0, 0}, {0, 0}},
    {HEALTH, RPC_ORIGIN_HEALTH, {0, 0}, {0, 0}, {0, 0}},
    {DATA,
     RPC_ORIGIN_HEALTH,
     {SRV_ACCESS_HEALTH_PORT, SRV_ACCESS_HEALTH_PORT},
     {SRV_ACCESS_HEALTH_PORT, SRV_ACCESS_HEALTH_PORT},
     {SRV_ACCESS_HEALTH_PORT, SRV_ACCESS_HEALTH_PORT}},
    {DRAIN,
     RPC_ORIGIN_HEALTH,
     {SRV_ACCESS_HEALTH_PORT, SRV_ACCESS_HEALTH_PORT},
     {SRV_ACCESS_HEALTH_PORT, SRV_ACCESS_HEALTH_PORT},
     {SRV_ACCESS_HEALTH_PORT, SRV_ACCESS_HEALTH_PORT}},
    {REFLECTION,
     RPC_ORIGIN_HEALTH,
     {SRV_ACCESS_HEALTH_PORT, SRV_ACCESS_HEALTH_PORT},
     {SRV_ACCESS_HEALTH_PORT, SRV_ACCESS_HEALTH_PORT},
     {SRV_ACCESS_HEALTH_PORT, SRV_ACCESS_HEALTH_PORT}},
};

START_TEST(the_door_by_origin_method_and_token)
{
    struct srv_err err;

    write_tokens(GOOD_TOKEN "\n", 0600);
    for (size_t i = 0; i < sizeof(door_rows) / sizeof(door_rows[0]); i++)
        for (int any = 0; any < 2; any++) {
            enum rpc_origin origin = door_rows[i].origin;
            const char *path = door_rows[i].path;

            KIT_OK(open_door(false, any, &err), &err);
            ck_assert_msg(decide(origin, path, NULL) == door_rows[i].open[any], "row %zu, admin %d", i, any);
            KIT_OK(open_door(true, any, &err), &err);
            ck_assert_msg(decide(origin, path, NULL) == door_rows[i].no_token[any], "row %zu, admin %d", i,
                          any);
            ck_assert_msg(decide(origin, path, "Bearer " GOOD_TOKEN) == door_rows[i].good[any],
                          "row %zu, admin %d", i, any);
        }
}
END_TEST

START_TEST(tokens_must_be_whole)
{
    static const char *const bad[] = {"",
                                      "Bearer",
                                      "Bearer ",
                                      GOOD_TOKEN,
                                      "Basic " GOOD_TOKEN,
                                      "Bearer  " GOOD_TOKEN,
                                      "Bearer " GOOD_TOKEN " ",
                                      "Bearer " GOOD_TOKEN GOOD_TOKEN,
                                      "Bearer abcdefghijklmno",
                                      "Bearer Abcdefghijklmnop",
                                      "Bearer \n" GOOD_TOKEN};
    struct srv_err err;

    write_tokens("\n  \n" GOOD_TOKEN " \r\n" OTHER_TOKEN, 0640);
    KIT_OK(open_door(true, false, &err), &err);
    ck_assert_int_eq(decide(RPC_ORIGIN_TLS, DATA, "Bearer " GOOD_TOKEN), SRV_ACCESS_OK);
    ck_assert_int_eq(decide(RPC_ORIGIN_TLS, DATA, "bearer " OTHER_TOKEN), SRV_ACCESS_OK);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        ck_assert_msg(decide(RPC_ORIGIN_TLS, DATA, bad[i]) == SRV_ACCESS_BAD_TOKEN, "\"%s\"", bad[i]);
    ck_assert_int_eq(srv_access_decide(door, RPC_ORIGIN_TCP, DATA, "Bearer " GOOD_TOKEN "x", 7 + 16),
                     SRV_ACCESS_OK);
}
END_TEST

START_TEST(bad_token_files_are_refused_with_a_reason)
{
    static const struct {
        const char *text;
        mode_t mode;
        const char *said;
    } rows[] = {
        {GOOD_TOKEN "\n", 0604, "every user"},
        {GOOD_TOKEN "\n", 0602, "every user"},
        {"", 0600, "no token"},
        {"\n \n", 0600, "no token"},
        {GOOD_TOKEN "\nshort\n", 0600, "line 2"},
        {"a token with blanks in it\n", 0600, "line 1"},
        {"\n\n# a comment is none\n", 0600, "line 3"},
    };
    struct srv_err err;

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        write_tokens(rows[i].text, rows[i].mode);
        ck_assert_int_eq(open_door(true, false, &err), DSA_E_BAD_REQUEST);
        ck_assert_str_eq(err.field, "auth-token-file");
        ck_assert_msg(strstr(err.text, rows[i].said) != NULL, "row %zu: %s", i, err.text);
    }
    unlink(token_path);
    ck_assert_int_eq(open_door(true, false, &err), DSA_E_BAD_REQUEST);
    ck_assert_ptr_nonnull(strstr(err.text, "cannot be read"));
}
END_TEST

START_TEST(tokens_are_reloaded_and_bad_ones_are_not)
{
    struct srv_err err;

    write_tokens(GOOD_TOKEN "\n", 0600);
    KIT_OK(open_door(true, false, &err), &err);
    write_tokens("short\n", 0600);
    ck_assert_int_eq(srv_access_reload(door, &err), DSA_E_BAD_REQUEST);
    ck_assert_int_eq(decide(RPC_ORIGIN_TLS, DATA, "Bearer " GOOD_TOKEN), SRV_ACCESS_OK);
    write_tokens(OTHER_TOKEN "\n", 0600);
    KIT_OK(srv_access_reload(door, &err), &err);
    ck_assert_int_eq(decide(RPC_ORIGIN_TLS, DATA, "Bearer " GOOD_TOKEN), SRV_ACCESS_BAD_TOKEN);
    ck_assert_int_eq(decide(RPC_ORIGIN_TLS, DATA, "Bearer " OTHER_TOKEN), SRV_ACCESS_OK);
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    TCase *bytes = tcase_create("bytes"), *timeout = tcase_create("timeout"), *access = tcase_create("door");

    (void)max;
    tcase_add_checked_fixture(bytes, open_all, close_all);
    tcase_set_timeout(bytes, 60);
    tcase_add_test(bytes, bytes_of_every_size_go_both_ways);
    tcase_add_test(bytes, many_connections_do_not_mix);
    tcase_add_test(bytes, a_client_that_does_not_read_stops_grpc);
    tcase_add_test(bytes, grpc_that_does_not_read_stops_a_client);
    tcase_add_test(bytes, a_stuck_client_is_dropped_when_grpc_has_closed);
    tcase_add_test(bytes, a_clients_goodbye_reaches_grpc);
    tcase_add_test(bytes, an_end_without_goodbye_reaches_grpc);
    tcase_add_test(bytes, a_reset_reaches_grpc);
    tcase_add_test(bytes, what_grpc_wrote_before_it_closed_arrives);
    tcase_add_test(bytes, stopping_delivers_the_last_words);
    tcase_add_test(bytes, stopping_does_not_wait_for_a_stuck_client);
    tcase_add_test(bytes, garbage_is_refused);
    tcase_add_test(bytes, a_client_that_leaves_at_once_is_counted_as_gone);
    tcase_add_test(bytes, a_new_certificate_is_for_new_connections);
    tcase_add_test(bytes, a_bad_file_keeps_the_old_certificate);
    tcase_add_checked_fixture(timeout, open_impatient, close_all);
    tcase_add_test(timeout, a_silent_client_is_dropped);
    tcase_add_checked_fixture(access, open_dir, close_dir);
    tcase_add_test(access, the_door_by_origin_method_and_token);
    tcase_add_test(access, tokens_must_be_whole);
    tcase_add_test(access, bad_token_files_are_refused_with_a_reason);
    tcase_add_test(access, tokens_are_reloaded_and_bad_ones_are_not);
    suites_p[0] = suite_create("tls");
    suite_add_tcase(suites_p[0], bytes);
    suite_add_tcase(suites_p[0], timeout);
    suite_add_tcase(suites_p[0], access);
    return 1;
}
