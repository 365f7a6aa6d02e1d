/* The socket that takes file descriptors: what is accepted, what is refused and why, and that no
 * descriptor stays. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "dsa_fdsock.h"
#include "kit.h"
#include "server/fdsock.h"

#define MAX_FDS   12
#define MAX_PEERS 24

static struct kit_loop k;
static char *path;
static struct srv_fdsock *fdsock;
static int client, memfd;

/* What L was offered; main reads it after the answer came. */
static struct {
    dsa_status answer; /* what the next offer is answered with */
    int n;
    uint8_t token[16];
    uint64_t ticket;
    int fd;
    bool is_cloexec;
} offered;

static dsa_status on_offer(void *arg, const uint8_t *token, uint64_t ticket, int fd, struct srv_err *err)
{
    ck_assert_ptr_eq(arg, &offered);
    offered.n++;
    memcpy(offered.token, token, 16);
    offered.ticket = ticket;
    offered.is_cloexec = (fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0;
    if (offered.answer != DSA_OK)
        return srv_fail(err, offered.answer, "session", "%s", "value", "the test says no");
    offered.fd = fd;
    return DSA_OK;
}

static struct dsa_fd_offer make_offer(uint64_t ticket)
{
    struct dsa_fd_offer offer = {.magic = DSA_FD_MAGIC, .version = DSA_FD_VERSION, .ticket = ticket};

    memcpy(offer.session, "0123456789abcdef", 16);
    return offer;
}

static void send_bytes(const void *bytes, size_t n, int n_fds)
{
    union {
        char bytes[CMSG_SPACE(sizeof(int) * MAX_FDS)];
        struct cmsghdr align;
    } control;
    struct iovec iov = {(void *)(uintptr_t)bytes, n};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};

    memset(&control, 0, sizeof(control));
    if (n_fds > 0) {
        struct cmsghdr *cmsg = &control.align;

        msg.msg_control = &control;
        msg.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)n_fds);
        cmsg->cmsg_level = SOL_SOCKET;
        cmsg->cmsg_type = SCM_RIGHTS;
        cmsg->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)n_fds);
        for (int i = 0; i < n_fds; i++)
            memcpy(CMSG_DATA(cmsg) + sizeof(int) * (size_t)i, &memfd, sizeof(int));
    }
    ck_assert_int_eq(sendmsg(client, &msg, MSG_NOSIGNAL), (ssize_t)n);
}

/* The server's answer; fails the test when none comes. */
static struct dsa_fd_answer get_answer(void)
{
    struct pollfd ready = {.fd = client, .events = POLLIN};
    struct dsa_fd_answer answer;

    ck_assert_int_eq(poll(&ready, 1, KIT_PATIENCE_S * 1000), 1);
    ck_assert_int_eq(recv(client, &answer, sizeof(answer), 0), sizeof(answer));
    return answer;
}

static struct dsa_fd_answer ask(const void *bytes, size_t n, int n_fds)
{
    send_bytes(bytes, n, n_fds);
    return get_answer();
}

static void open_all(void)
{
    struct srv_fdsock_config config = {
        .mode = 0660, .max_connections = MAX_PEERS, .offer = on_offer, .arg = &offered};
    struct srv_err err = {0};

    kit_dir_make();
    path = kit_path("s.fd");
    memset(&offered, 0, sizeof(offered));
    kit_loop_open(&k, 0);
    config.path = path;
    KIT_OK(srv_fdsock_open(k.loop, &config, &fdsock, &err), &err);
    memfd = memfd_create("test", MFD_CLOEXEC);
    ck_assert_int_ge(memfd, 0);
    kit_loop_start(&k);
    client = kit_connect(path, SOCK_SEQPACKET);
    ck_assert_int_ge(client, 0);
    /* With one answer back, the server's end of the connection is open too: descriptors can be counted. */
    ck_assert_int_eq(ask("?", 1, 0).status, DSA_E_BAD_REQUEST);
}

static void close_all(void)
{
    kit_loop_stop(&k);
    close(client);
    close(memfd);
    srv_fdsock_close(fdsock);
    kit_loop_close(&k);
    kit_dir_remove();
    free(path);
}

START_TEST(an_offer_is_passed_on)
{
    struct dsa_fd_offer offer = make_offer(42);
    struct dsa_fd_answer answer = ask(&offer, sizeof(offer), 1);
    char byte = 0;

    ck_assert_int_eq(answer.status, DSA_OK);
    ck_assert_uint_eq(answer.ticket, 42);
    ck_assert_str_eq(answer.text, "");
    ck_assert_int_eq(offered.n, 1);
    ck_assert_uint_eq(offered.ticket, 42);
    ck_assert_int_eq(memcmp(offered.token, offer.session, 16), 0);
    ck_assert(offered.is_cloexec);
    ck_assert_int_ne(offered.fd, memfd);
    ck_assert_int_eq(pwrite(memfd, "m", 1, 0), 1); /* and it is the same memory */
    ck_assert_int_eq(pread(offered.fd, &byte, 1, 0), 1);
    ck_assert_int_eq(byte, 'm');
    close(offered.fd);
}
END_TEST

START_TEST(many_offers_are_answered_in_order)
{
    enum { N = 40 }; /* more than one round takes */
    int n_fds = kit_n_fds();

    for (uint64_t i = 1; i <= N; i++) {
        struct dsa_fd_offer offer = make_offer(i);

        send_bytes(&offer, sizeof(offer), i % 4 == 0 ? 0 : 1);
        if (i % 10 == 0) {
            for (uint64_t k_answer = i - 9; k_answer <= i; k_answer++) {
                struct dsa_fd_answer answer = get_answer();

                ck_assert_uint_eq(answer.ticket, k_answer);
                ck_assert_int_eq(answer.status, k_answer % 4 == 0 ? DSA_E_BAD_FD : DSA_OK);
            }
        }
    }
    ck_assert_int_eq(offered.n, 30);
    ck_assert_int_eq(kit_n_fds(), n_fds + 30); /* what the owner kept, and no more */
}
END_TEST

START_TEST(a_refusal_of_the_owner_is_told_and_closed)
{
    struct dsa_fd_offer offer = make_offer(9);
    int n_fds = kit_n_fds();
    struct dsa_fd_answer answer;

    offered.answer = DSA_E_NO_SESSION;
    answer = ask(&offer, sizeof(offer), 1);
    ck_assert_int_eq(answer.status, DSA_E_NO_SESSION);
    ck_assert_uint_eq(answer.ticket, 9);
    ck_assert_ptr_nonnull(strstr(answer.text, "the test says no"));
    ck_assert_int_eq(kit_n_fds(), n_fds);
}
END_TEST

static const struct {
    const char *what;
    uint32_t magic, version;
    uint64_t ticket;
    size_t n; /* bytes sent */
    int n_fds;
    dsa_status status;
} bad[] = {
    {"wrong magic", 0x12345678, DSA_FD_VERSION, 1, 32, 1, DSA_E_BAD_REQUEST},
    {"other version", DSA_FD_MAGIC, DSA_FD_VERSION + 1, 1, 32, 1, DSA_E_BAD_REQUEST},
    {"ticket 0", DSA_FD_MAGIC, DSA_FD_VERSION, 0, 32, 1, DSA_E_BAD_REQUEST},
    {"one byte", DSA_FD_MAGIC, DSA_FD_VERSION, 1, 1, 1, DSA_E_BAD_REQUEST},
    {"a byte short", DSA_FD_MAGIC, DSA_FD_VERSION, 1, 31, 1, DSA_E_BAD_REQUEST},
    {"a byte long", DSA_FD_MAGIC, DSA_FD_VERSION, 1, 33, 1, DSA_E_BAD_REQUEST},
    {"far too long", DSA_FD_MAGIC, DSA_FD_VERSION, 1, 4096, 1, DSA_E_BAD_REQUEST},
    {"no descriptor", DSA_FD_MAGIC, DSA_FD_VERSION, 1, 32, 0, DSA_E_BAD_FD},
    {"two descriptors", DSA_FD_MAGIC, DSA_FD_VERSION, 1, 32, 2, DSA_E_BAD_FD},
    {"eight descriptors", DSA_FD_MAGIC, DSA_FD_VERSION, 1, 32, 8, DSA_E_BAD_FD},
    {"more than there is room for", DSA_FD_MAGIC, DSA_FD_VERSION, 1, 32, MAX_FDS, DSA_E_BAD_FD},
    {"wrong and with several", 0, 0, 0, 7, 3, DSA_E_BAD_REQUEST},
};

/* A bad offer is answered, its descriptors are closed, and the next good one on the same connection is
 * served. */
START_TEST(bad_offers_are_refused)
{
    uint8_t bytes[4096] = {0};
    struct dsa_fd_offer offer = make_offer(bad[_i].ticket);
    int n_fds = kit_n_fds();
    struct dsa_fd_answer answer;

    offer.magic = bad[_i].magic;
    offer.version = bad[_i].version;
    memcpy(bytes, &offer, sizeof(offer));
    answer = ask(bytes, bad[_i].n, bad[_i].n_fds);
    ck_assert_msg(answer.status == (int)bad[_i].status, "%s: %d", bad[_i].what, answer.status);
    ck_assert_uint_gt(strlen(answer.text), 0);
    ck_assert_int_eq(offered.n, 0);
    ck_assert_msg(kit_n_fds() == n_fds, "%s: a descriptor stayed", bad[_i].what);
    offer = make_offer(5);
    answer = ask(&offer, sizeof(offer), 1);
    ck_assert_int_eq(answer.status, DSA_OK);
    close(offered.fd);
}
END_TEST

static void do_nothing(void *arg)
{
    (void)arg;
}

START_TEST(clients_that_go_early_leave_nothing)
{
    int n_fds;

    close(client);
    kit_loop_call(&k, do_nothing, NULL);
    offered.answer = DSA_E_NO_SESSION; /* before the first offer: from then on it is L's to read */
    for (int i = 0; i < 8; i++) {
        struct dsa_fd_offer offer = make_offer((uint64_t)i + 1);

        client = kit_connect(path, SOCK_SEQPACKET);
        ck_assert_int_ge(client, 0);
        if (i % 3 > 0)
            send_bytes(&offer, i % 3 == 1 ? 5 : sizeof(offer), i % 2);
        close(client); /* without reading the answer */
    }
    /* Connections are served in order: when this one has its answer, those before are gone or done. */
    client = kit_connect(path, SOCK_SEQPACKET);
    for (int i = 0; i < 3; i++) {
        struct dsa_fd_offer offer = make_offer(77);

        ck_assert_int_eq(ask(&offer, sizeof(offer), 1).status, DSA_E_NO_SESSION);
    }
    n_fds = kit_n_fds();
    for (int i = 0; i < 8; i++) {
        struct dsa_fd_offer offer = make_offer(78);

        ck_assert_int_eq(ask(&offer, sizeof(offer), 1).status, DSA_E_NO_SESSION);
    }
    ck_assert_int_le(kit_n_fds(), n_fds);
}
END_TEST

/* An empty packet looks like the end of the connection; whatever it is taken for, the server goes on. */
START_TEST(empty_packets_do_no_harm)
{
    struct dsa_fd_offer offer = make_offer(3);

    send_bytes("", 0, 0);
    close(client);
    client = kit_connect(path, SOCK_SEQPACKET);
    ck_assert_int_eq(ask(&offer, sizeof(offer), 1).status, DSA_OK);
    close(offered.fd);
    send_bytes("", 0, 2);
    ck_assert_int_eq(get_answer().status, DSA_E_BAD_REQUEST);
}
END_TEST

/* A client that never reads its answers loses the connection, not the server's time. */
START_TEST(a_client_that_does_not_read_is_dropped)
{
    struct dsa_fd_offer offer = make_offer(1);
    int other;

    offered.answer = DSA_E_NO_SESSION;
    for (int i = 0; i < 100000; i++)
        if (send(client, &offer, sizeof(offer), MSG_NOSIGNAL) < 0)
            break;
        else if (i == 99999)
            ck_abort_msg("the server takes offers for ever");
    ck_assert(errno == EPIPE || errno == ECONNRESET);
    other = client;
    client = kit_connect(path, SOCK_SEQPACKET);
    ck_assert_int_eq(ask(&offer, sizeof(offer), 1).status, DSA_E_NO_SESSION);
    close(other);
}
END_TEST

static int connect_and_say_something(void)
{
    int mine = client, fd;

    client = fd = kit_connect(path, SOCK_SEQPACKET);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(ask("?", 1, 0).status, DSA_E_BAD_REQUEST);
    client = mine;
    return fd;
}

/* At the cap a newcomer takes the place of whoever has been silent longest; those who speak stay. */
START_TEST(the_most_silent_makes_room)
{
    struct dsa_fd_offer offer = make_offer(6);
    int others[MAX_PEERS], newcomer;
    char byte;

    for (int i = 1; i < MAX_PEERS; i++)
        others[i] = connect_and_say_something();
    ck_assert_int_eq(ask(&offer, sizeof(offer), 1).status, DSA_OK); /* the oldest connection speaks again */
    close(offered.fd);
    newcomer = connect_and_say_something();
    ck_assert_int_eq(poll(&(struct pollfd){.fd = others[1], .events = POLLIN}, 1, KIT_PATIENCE_S * 1000), 1);
    ck_assert_int_eq(recv(others[1], &byte, 1, 0), 0);
    ck_assert_int_eq(ask(&offer, sizeof(offer), 1).status, DSA_OK);
    close(offered.fd);
    for (int i = 1; i < MAX_PEERS; i++)
        close(others[i]);
    close(newcomer);
}
END_TEST

START_TEST(closing_with_open_connections)
{
    int more = kit_connect(path, SOCK_SEQPACKET);
    struct dsa_fd_offer offer = make_offer(1);

    ck_assert_int_ge(more, 0);
    ck_assert_int_eq(ask(&offer, sizeof(offer), 1).status, DSA_OK);
    close(offered.fd);
    close(more); /* close_all closes the server with `client` connected */
    srv_fdsock_close(NULL);
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    TCase *tc = tcase_create("fdsock");

    (void)max;
    tcase_add_checked_fixture(tc, open_all, close_all);
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, an_offer_is_passed_on);
    tcase_add_test(tc, many_offers_are_answered_in_order);
    tcase_add_test(tc, a_refusal_of_the_owner_is_told_and_closed);
    tcase_add_loop_test(tc, bad_offers_are_refused, 0, (int)(sizeof(bad) / sizeof(bad[0])));
    tcase_add_test(tc, clients_that_go_early_leave_nothing);
    tcase_add_test(tc, empty_packets_do_no_harm);
    tcase_add_test(tc, a_client_that_does_not_read_is_dropped);
    tcase_add_test(tc, the_most_silent_makes_room);
    tcase_add_test(tc, closing_with_open_connections);
    suites_p[0] = suite_create("fdsock");
    suite_add_tcase(suites_p[0], tc);
    return 1;
}
