/* The sockets that clients connect to: who may listen where, how many may come, and what happens when
 * descriptors or memory run out. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "kit.h"
#include "server/listener.h"

#define MAX_CONNECTIONS 3

static struct kit_loop k;
static char *path;
static struct srv_listener *listener;

/* What L accepted; main reads it after it took `accepted`. */
static int accepted_fds[64];
static atomic_int n_accepted;
static sem_t accepted;

static void on_accept(void *arg, int fd)
{
    ck_assert_ptr_eq(arg, &k);
    accepted_fds[atomic_load(&n_accepted)] = fd;
    atomic_fetch_add(&n_accepted, 1);
    sem_post(&accepted);
}

static void open_all(void)
{
    kit_dir_make();
    path = kit_path("s");
    sem_init(&accepted, 0, 0);
    atomic_store(&n_accepted, 0);
    kit_loop_open(&k, 0);
}

static void close_all(void)
{
    if (k.is_running)
        kit_loop_stop(&k);
    for (int i = 0; i < atomic_load(&n_accepted); i++)
        close(accepted_fds[i]); /* those that a test has closed fail quietly */
    srv_listener_close(listener);
    listener = NULL;
    kit_loop_close(&k);
    kit_dir_remove();
    free(path);
}

static struct srv_listener_config unix_config(void)
{
    struct srv_listener_config config = {
        .unix_path = path,
        .flag = "listen",
        .socket_type = SOCK_STREAM,
        .mode = 0660,
        .max_connections = MAX_CONNECTIONS,
        .accept = on_accept,
        .arg = &k,
    };

    return config;
}

static dsa_status listen_at(const char *where, struct srv_listener **listener_p, struct srv_err *err)
{
    struct srv_listener_config config = unix_config();

    config.unix_path = where;
    memset(err, 0, sizeof(*err));
    return srv_listener_open(k.loop, &config, listener_p, err);
}

static void listen_here(void)
{
    struct srv_err err;

    KIT_OK(listen_at(path, &listener, &err), &err);
}

/* ---- serving --------------------------------------------------------------------------------- */

START_TEST(connections_are_handed_over)
{
    struct stat st;
    int client;
    char byte = 'x';

    listen_here();
    kit_loop_start(&k);
    ck_assert_int_eq(stat(path, &st), 0);
    ck_assert(S_ISSOCK(st.st_mode));
    ck_assert_uint_eq(st.st_mode & 0777, 0660);
    client = kit_connect(path, SOCK_STREAM);
    ck_assert_int_ge(client, 0);
    ck_assert(kit_wait(&accepted));
    ck_assert_int_ne(fcntl(accepted_fds[0], F_GETFL) & O_NONBLOCK, 0);
    ck_assert_int_ne(fcntl(accepted_fds[0], F_GETFD) & FD_CLOEXEC, 0);
    ck_assert_int_eq(write(accepted_fds[0], &byte, 1), 1);
    byte = 0;
    ck_assert_int_eq(read(client, &byte, 1), 1);
    ck_assert_int_eq(byte, 'x');
    close(client);
}
END_TEST

START_TEST(mode_is_never_wider_than_asked)
{
    struct srv_listener_config config = unix_config();
    struct srv_err err;
    struct stat st;

    config.mode = 0600;
    KIT_OK(srv_listener_open(k.loop, &config, &listener, &err), &err);
    ck_assert_int_eq(stat(path, &st), 0);
    ck_assert_uint_eq(st.st_mode & 0777, 0600);
    ck_assert_int_eq(umask(022), 022); /* given back */
}
END_TEST

START_TEST(closing_removes_the_socket_and_keeps_the_lock_file)
{
    char *lock = kit_path("s.lock");

    listen_here();
    ck_assert_int_eq(access(lock, F_OK), 0);
    srv_listener_close(listener);
    listener = NULL;
    ck_assert_int_ne(access(path, F_OK), 0);
    ck_assert_int_eq(access(lock, F_OK), 0);
    srv_listener_close(NULL);
    free(lock);
}
END_TEST

/* ---- who may listen -------------------------------------------------------------------------- */

START_TEST(a_second_server_is_refused_and_harms_nothing)
{
    struct srv_listener *second = NULL;
    struct srv_err err;
    int client;

    listen_here();
    ck_assert_int_eq(listen_at(path, &second, &err), DSA_E_PRECONDITION);
    ck_assert_str_eq(err.field, "listen");
    ck_assert_ptr_null(second);
    kit_loop_start(&k);
    client = kit_connect(path, SOCK_STREAM);
    ck_assert_int_ge(client, 0);
    ck_assert(kit_wait(&accepted));
    close(client);
}
END_TEST

static void make_stale_socket(const char *at)
{
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);

    strcpy(addr.sun_path, at);
    ck_assert_int_eq(bind(fd, (struct sockaddr *)&addr, sizeof(addr)), 0);
    close(fd);
}

START_TEST(a_dead_servers_socket_is_replaced)
{
    int client;

    make_stale_socket(path);
    kit_log_begin();
    listen_here();
    kit_log_expect("replaced a socket that no server held");
    kit_log_end();
    kit_loop_start(&k);
    client = kit_connect(path, SOCK_STREAM);
    ck_assert_int_ge(client, 0);
    ck_assert(kit_wait(&accepted));
    close(client);
}
END_TEST

START_TEST(anything_else_at_the_path_is_left_alone)
{
    struct srv_listener *refused = NULL;
    char *target = kit_path("target"), text[8] = "";
    struct srv_err err;
    struct stat st;
    int fd = open(path, O_CREAT | O_RDWR, 0600);

    ck_assert_int_eq(write(fd, "keep me", 7), 7);
    ck_assert_int_eq(listen_at(path, &refused, &err), DSA_E_BAD_REQUEST);
    ck_assert_str_eq(err.value, path);
    ck_assert_int_eq(pread(fd, text, 7, 0), 7);
    ck_assert_str_eq(text, "keep me");
    close(fd);
    ck_assert_int_eq(unlink(path), 0);
    ck_assert_int_eq(mkdir(path, 0700), 0);
    ck_assert_int_eq(listen_at(path, &refused, &err), DSA_E_BAD_REQUEST);
    ck_assert_int_eq(rmdir(path), 0);
    make_stale_socket(target);
    ck_assert_int_eq(symlink(target, path), 0);
    ck_assert_int_eq(listen_at(path, &refused, &err), DSA_E_BAD_REQUEST);
    ck_assert_int_eq(lstat(path, &st), 0);
    ck_assert(S_ISLNK(st.st_mode));
    ck_assert_int_eq(access(target, F_OK), 0);
    free(target);
}
END_TEST

START_TEST(the_lock_file_is_not_followed)
{
    struct srv_listener *refused = NULL;
    char *lock = kit_path("s.lock"), *target = kit_path("target");
    struct srv_err err;

    ck_assert_int_eq(symlink(target, lock), 0);
    ck_assert_int_eq(listen_at(path, &refused, &err), DSA_E_SYSTEM);
    ck_assert_ptr_nonnull(strstr(err.text, "lock"));
    ck_assert_int_ne(access(target, F_OK), 0);
    free(lock);
    free(target);
}
END_TEST

START_TEST(paths_that_cannot_be)
{
    struct srv_listener *refused = NULL;
    char longest[200];
    struct srv_err err;

    memset(longest, 'x', sizeof(longest));
    longest[108] = '\0';
    ck_assert_int_eq(listen_at(longest, &refused, &err), DSA_E_BAD_REQUEST);
    ck_assert_int_eq(listen_at("", &refused, &err), DSA_E_BAD_REQUEST);
    ck_assert_int_eq(listen_at("/nonexistent/dsad.sock", &refused, &err), DSA_E_BAD_REQUEST);
    ck_assert_str_eq(err.field, "listen");
    ck_assert_ptr_nonnull(strstr(err.text, "folder"));
}
END_TEST

START_TEST(a_refusal_keeps_nothing_open)
{
    struct srv_listener *refused = NULL;
    struct srv_err err;
    int before = kit_n_fds();

    listen_here();
    for (int i = 0; i < 3; i++) {
        ck_assert_int_eq(listen_at(path, &refused, &err), DSA_E_PRECONDITION);
        ck_assert_int_eq(listen_at("/nonexistent/dsad.sock", &refused, &err), DSA_E_BAD_REQUEST);
    }
    ck_assert_int_eq(kit_n_fds(), before + 2); /* socket and lock of the one that listens */
}
END_TEST

/* ---- TCP ------------------------------------------------------------------------------------- */

static dsa_status listen_tcp(const char *address, struct srv_listener **listener_p, struct srv_err *err)
{
    struct srv_listener_config config = unix_config();

    config.unix_path = NULL;
    config.tcp = address;
    config.flag = "tcp";
    memset(err, 0, sizeof(*err));
    return srv_listener_open(k.loop, &config, listener_p, err);
}

START_TEST(tcp_serves_on_a_port_of_its_choice)
{
    struct sockaddr_in addr = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct srv_listener *second = NULL;
    struct srv_err err;
    char same[32];
    int client = socket(AF_INET, SOCK_STREAM, 0);

    KIT_OK(listen_tcp("127.0.0.1:0", &listener, &err), &err);
    ck_assert_int_gt(srv_listener_port(listener), 0);
    snprintf(same, sizeof(same), "127.0.0.1:%d", srv_listener_port(listener));
    ck_assert_int_eq(listen_tcp(same, &second, &err), DSA_E_SYSTEM); /* never shared silently */
    ck_assert_str_eq(err.field, "tcp");
    kit_loop_start(&k);
    addr.sin_port = htons((uint16_t)srv_listener_port(listener));
    ck_assert_int_eq(connect(client, (struct sockaddr *)&addr, sizeof(addr)), 0);
    ck_assert(kit_wait(&accepted));
    close(client);
}
END_TEST

START_TEST(tcp_addresses_that_are_malformed)
{
    static const char *const bad[] = {
        "",
        ":",
        "localhost",
        "localhost:",
        ":8080",
        "127.0.0.1:x",
        "127.0.0.1:http",
        "256.1.1.1:80",
        "127.0.0.1:0:0x",
        "no such host:1",
        "a-host-name-that-is-much-longer-than-the-room-that-there-is-for-it-here:1"};
    struct srv_listener *refused = NULL;
    struct srv_err err;

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        ck_assert_msg(listen_tcp(bad[i], &refused, &err) == DSA_E_BAD_REQUEST, "\"%s\"", bad[i]);
        ck_assert_str_eq(err.field, "tcp");
    }
}
END_TEST

START_TEST(tcp_beyond_loopback_is_warned_about)
{
    struct srv_err err;

    kit_log_begin();
    KIT_OK(listen_tcp("0.0.0.0:0", &listener, &err), &err);
    kit_log_expect("plain-text gRPC leaves loopback");
    kit_log_end();
}
END_TEST

START_TEST(tcp_takes_ipv6_in_brackets)
{
    struct srv_err err;
    dsa_status rc = listen_tcp("[::1]:0", &listener, &err);

    if (rc == DSA_E_SYSTEM)
        TEST_SKIP("this machine has no IPv6 loopback (%s)", err.text);
    ck_assert_int_eq(rc, DSA_OK);
    ck_assert_int_gt(srv_listener_port(listener), 0);
}
END_TEST

/* ---- limits ---------------------------------------------------------------------------------- */

static void close_accepted(void *arg)
{
    int *i = arg;

    close(accepted_fds[*i]);
}

/* Waits for the server to close a connection. */
static void expect_closed(int client)
{
    struct pollfd ready = {.fd = client, .events = POLLIN};
    char byte;

    ck_assert_int_eq(poll(&ready, 1, KIT_PATIENCE_S * 1000), 1);
    ck_assert_int_le(read(client, &byte, 1), 0);
}

START_TEST(the_connection_cap_holds_and_frees_again)
{
    int clients[MAX_CONNECTIONS], extra, gone = 1;

    listen_here();
    kit_loop_start(&k);
    for (int i = 0; i < MAX_CONNECTIONS; i++) {
        clients[i] = kit_connect(path, SOCK_STREAM);
        ck_assert(kit_wait(&accepted));
    }
    for (int i = 0; i < 3; i++) {
        kit_log_begin();
        extra = kit_connect(path, SOCK_STREAM);
        expect_closed(extra);
        kit_log_end();
        close(extra);
    }
    ck_assert_int_eq(atomic_load(&n_accepted), MAX_CONNECTIONS);
    close(clients[gone]);
    kit_loop_call(&k, close_accepted, &gone);
    clients[gone] = kit_connect(path, SOCK_STREAM);
    ck_assert(kit_wait(&accepted)); /* the one that went made room */
    kit_log_begin();
    extra = kit_connect(path, SOCK_STREAM);
    expect_closed(extra);
    kit_log_end();
    close(extra);
    for (int i = 0; i < MAX_CONNECTIONS; i++)
        close(clients[i]);
}
END_TEST

/* GRPC core's own listener never accepts again after this. */
START_TEST(out_of_descriptors_then_serving_again)
{
    struct rlimit limit, full;
    int clients[MAX_CONNECTIONS], lowest;

    listen_here();
    kit_loop_start(&k);
    for (int i = 0; i < MAX_CONNECTIONS; i++)
        clients[i] = socket(AF_UNIX, SOCK_STREAM, 0);
    kit_log_begin();
    lowest = dup(0); /* the next descriptor that there would be */
    close(lowest);
    ck_assert_int_eq(getrlimit(RLIMIT_NOFILE, &limit), 0);
    full = limit;
    full.rlim_cur = (rlim_t)lowest;
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &full), 0);
    for (int i = 0; i < MAX_CONNECTIONS; i++) {
        struct sockaddr_un addr = {.sun_family = AF_UNIX};

        strcpy(addr.sun_path, path);
        ck_assert_int_eq(connect(clients[i], (struct sockaddr *)&addr, sizeof(addr)), 0);
    }
    kit_log_expect("cannot accept, trying again");
    ck_assert_int_eq(atomic_load(&n_accepted), 0);
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    for (int i = 0; i < MAX_CONNECTIONS; i++)
        ck_assert_msg(kit_wait(&accepted), "connection %d was never accepted", i); /* the backlog kept them */
    kit_log_end();
    for (int i = 0; i < MAX_CONNECTIONS; i++)
        close(clients[i]);
}
END_TEST

START_TEST(closing_while_it_waits_for_descriptors)
{
    struct rlimit limit, full;
    int client, lowest;
    struct sockaddr_un addr = {.sun_family = AF_UNIX};

    listen_here();
    kit_loop_start(&k);
    client = socket(AF_UNIX, SOCK_STREAM, 0);
    kit_log_begin();
    lowest = dup(0);
    close(lowest);
    ck_assert_int_eq(getrlimit(RLIMIT_NOFILE, &limit), 0);
    full = limit;
    full.rlim_cur = (rlim_t)lowest;
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &full), 0);
    strcpy(addr.sun_path, path);
    ck_assert_int_eq(connect(client, (struct sockaddr *)&addr, sizeof(addr)), 0);
    kit_log_expect("cannot accept, trying again");
    kit_loop_stop(&k);
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    kit_log_end();
    close(client); /* close_all closes the listener with its timer running */
}
END_TEST

/* ---- memory ---------------------------------------------------------------------------------- */

START_TEST(each_failing_allocation_is_an_answer)
{
    struct srv_err err;
    int before = kit_n_fds();
    long n_allocs, n_live;

    kit_alloc_begin(0);
    if (listen_at(path, &listener, &err) != DSA_OK)
        ck_abort_msg("%s", err.text);
    n_allocs = kit_alloc_end(NULL);
    ck_assert_int_ge(n_allocs, 2);
    srv_listener_close(listener);
    listener = NULL;
    kit_loop_start(&k); /* the closing needs a round */
    kit_loop_stop(&k);
    for (long i = 1; i <= n_allocs; i++) {
        dsa_status rc;

        kit_alloc_begin(i);
        rc = listen_at(path, &listener, &err);
        kit_alloc_end(&n_live);
        ck_assert_int_eq(rc, DSA_E_NO_MEMORY);
        ck_assert_ptr_null(listener);
        ck_assert_int_eq(n_live, 0);
        ck_assert_int_eq(kit_n_fds(), before);
    }
    listen_here();
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    TCase *tc = tcase_create("listener");

    (void)max;
    tcase_add_checked_fixture(tc, open_all, close_all);
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, connections_are_handed_over);
    tcase_add_test(tc, mode_is_never_wider_than_asked);
    tcase_add_test(tc, closing_removes_the_socket_and_keeps_the_lock_file);
    tcase_add_test(tc, a_second_server_is_refused_and_harms_nothing);
    tcase_add_test(tc, a_dead_servers_socket_is_replaced);
    tcase_add_test(tc, anything_else_at_the_path_is_left_alone);
    tcase_add_test(tc, the_lock_file_is_not_followed);
    tcase_add_test(tc, paths_that_cannot_be);
    tcase_add_test(tc, a_refusal_keeps_nothing_open);
    tcase_add_test(tc, tcp_serves_on_a_port_of_its_choice);
    tcase_add_test(tc, tcp_addresses_that_are_malformed);
    tcase_add_test(tc, tcp_beyond_loopback_is_warned_about);
    tcase_add_test(tc, tcp_takes_ipv6_in_brackets);
    tcase_add_test(tc, the_connection_cap_holds_and_frees_again);
    tcase_add_test(tc, out_of_descriptors_then_serving_again);
    tcase_add_test(tc, closing_while_it_waits_for_descriptors);
    tcase_add_test(tc, each_failing_allocation_is_an_answer);
    suites_p[0] = suite_create("listener");
    suite_add_tcase(suites_p[0], tc);
    return 1;
}
