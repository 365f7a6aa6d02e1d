/* session: leases run out, tokens come back, numbers never do. Time is an argument, so it is made up here. */
#include "server/core/session.h"

#include <string.h>

#include "kit.h"
#include "test_main.h"

#define SECOND UINT64_C(1000000)

static const struct srv_session_config config = {.max_sessions = 4,
                                                 .default_lease_us = 10 * SECOND,
                                                 .max_lease_us = 60 * SECOND,
                                                 .max_grace_us = 30 * SECOND};

static struct srv_sessions *new_sessions(void)
{
    struct srv_sessions *sessions;

    ck_assert_int_eq(srv_sessions_create(&config, &sessions), DSA_OK);
    return sessions;
}

/* Tokens that differ in their last byte only: the hardest to tell apart. */
static const uint8_t *token_of(int i)
{
    static uint8_t tokens[256][SRV_TOKEN_BYTES];

    tokens[i][SRV_TOKEN_BYTES - 1] = (uint8_t)i;
    return tokens[i];
}

static struct srv_session *open_at(struct srv_sessions *sessions, int i, uint64_t lease_us, uint64_t grace_us,
                                   uint64_t now_us)
{
    struct srv_session *session;

    ck_assert_int_eq(
        srv_session_open(sessions, token_of(i), "client", lease_us, grace_us, now_us, &session, NULL),
        DSA_OK);
    return session;
}

static dsa_status find(struct srv_sessions *sessions, const uint8_t *token, struct srv_session **session_p)
{
    return srv_session_find(sessions, token, SRV_TOKEN_BYTES, session_p, NULL);
}

START_TEST(bad_limits_are_refused)
{
    struct srv_session_config bad[] = {config, config, config, config};
    struct srv_sessions *sessions = NULL;

    bad[0].max_sessions = 0;
    bad[1].default_lease_us = 0;
    bad[2].default_lease_us = bad[2].max_lease_us + 1;
    bad[3].max_sessions = UINT32_MAX;
    for (int i = 0; i < 4; i++)
        ck_assert_int_eq(srv_sessions_create(&bad[i], &sessions), DSA_E_BAD_REQUEST);
    ck_assert_ptr_null(sessions);
    srv_sessions_destroy(NULL);
}
END_TEST

START_TEST(an_open_session_is_found_by_token_and_number)
{
    struct srv_sessions *sessions = new_sessions();
    struct srv_session *a = open_at(sessions, 1, 0, 0, 5), *b = open_at(sessions, 2, 20 * SECOND, SECOND, 5);
    struct srv_session *found;

    ck_assert_uint_ne(a->number, 0);
    ck_assert_uint_ne(a->number, b->number);
    ck_assert_str_eq(a->name, "client");
    ck_assert_uint_eq(a->lease_us, 10 * SECOND);
    ck_assert_uint_eq(a->expires_us, 10 * SECOND + 5);
    ck_assert_uint_eq(b->expires_us, 20 * SECOND + 5);
    ck_assert_int_eq(find(sessions, token_of(2), &found), DSA_OK);
    ck_assert_ptr_eq(found, b);
    ck_assert_ptr_eq(srv_session_by_number(sessions, a->number), a);
    ck_assert_ptr_null(srv_session_by_number(sessions, 0));
    ck_assert_uint_eq(srv_sessions_count(sessions), 2);
    srv_sessions_destroy(sessions);
}
END_TEST

START_TEST(a_token_wrong_in_any_one_bit_is_not_found)
{
    struct srv_sessions *sessions = new_sessions();
    struct srv_session *found = NULL;
    uint8_t token[SRV_TOKEN_BYTES + 1] = {0};
    struct srv_err err;

    open_at(sessions, 7, 0, 0, 0);
    memcpy(token, token_of(7), SRV_TOKEN_BYTES);
    for (int bit = 0; bit < SRV_TOKEN_BYTES * 8; bit++) {
        token[bit / 8] ^= (uint8_t)(1 << bit % 8);
        ck_assert_int_eq(find(sessions, token, &found), DSA_E_NO_SESSION);
        token[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    ck_assert_int_eq(srv_session_find(sessions, token, 0, &found, &err), DSA_E_NO_SESSION);
    ck_assert_int_eq(srv_session_find(sessions, token, SRV_TOKEN_BYTES - 1, &found, &err), DSA_E_NO_SESSION);
    ck_assert_int_eq(srv_session_find(sessions, token, SRV_TOKEN_BYTES + 1, &found, &err), DSA_E_NO_SESSION);
    ck_assert_int_eq(srv_session_find(sessions, NULL, 0, &found, &err), DSA_E_NO_SESSION);
    ck_assert_str_eq(err.field, "session");
    ck_assert_ptr_null(found);
    srv_sessions_destroy(sessions);
}
END_TEST

/* Two tokens made to fall under one key of the map: found by all their bytes, not by the key. */
START_TEST(tokens_with_one_key_are_told_apart)
{
    struct srv_sessions *sessions = new_sessions();
    uint8_t a[SRV_TOKEN_BYTES] = {0}, b[SRV_TOKEN_BYTES] = {0};
    struct srv_session *sa, *sb, *found;

    b[0] = 1; /* low 1 ^ high 0x100000000 with its halves swapped = 0 ^ 0 */
    b[12] = 1;
    ck_assert_int_eq(srv_session_open(sessions, a, NULL, 0, 0, 0, &sa, NULL), DSA_OK);
    ck_assert_int_eq(srv_session_open(sessions, b, NULL, 0, 0, 0, &sb, NULL), DSA_OK);
    ck_assert_int_eq(find(sessions, a, &found), DSA_OK);
    ck_assert_ptr_eq(found, sa);
    ck_assert_int_eq(find(sessions, b, &found), DSA_OK);
    ck_assert_ptr_eq(found, sb);
    srv_session_close(sessions, sa);
    ck_assert_int_eq(find(sessions, a, &found), DSA_E_NO_SESSION);
    ck_assert_int_eq(find(sessions, b, &found), DSA_OK);
    srv_sessions_destroy(sessions);
}
END_TEST

START_TEST(refusals_name_the_limit)
{
    struct srv_sessions *sessions = new_sessions();
    struct srv_session *session = NULL;
    struct srv_err err;

    ck_assert_int_eq(srv_session_open(sessions, token_of(1), "", 60 * SECOND + 1, 0, 0, &session, &err),
                     DSA_E_BAD_RANGE);
    ck_assert_str_eq(err.field, "lease_us");
    ck_assert_ptr_nonnull(strstr(err.text, "max_lease"));
    ck_assert_int_eq(srv_session_open(sessions, token_of(1), "", 0, 30 * SECOND + 1, 0, &session, &err),
                     DSA_E_BAD_RANGE);
    ck_assert_str_eq(err.field, "grace_us");
    open_at(sessions, 1, 60 * SECOND, 30 * SECOND, 0);
    ck_assert_int_eq(srv_session_open(sessions, token_of(1), "", 0, 0, 0, &session, &err), DSA_E_EXISTS);
    for (int i = 2; i <= 4; i++)
        open_at(sessions, i, 0, 0, 0);
    ck_assert_int_eq(srv_session_open(sessions, token_of(5), "", 0, 0, 0, &session, &err), DSA_E_LIMIT);
    ck_assert_str_eq(err.field, "max_sessions");
    ck_assert_str_eq(err.value, "4");
    ck_assert_ptr_null(session);
    ck_assert_uint_eq(srv_sessions_count(sessions), 4);
    srv_sessions_destroy(sessions);
}
END_TEST

START_TEST(limits_can_change)
{
    struct srv_sessions *sessions = new_sessions();
    struct srv_session_config fresh = config;
    struct srv_session *session = NULL;
    struct srv_err err;

    for (int i = 1; i <= 3; i++)
        open_at(sessions, i, 0, 0, 0);
    fresh.max_sessions = 2;
    fresh.max_lease_us = fresh.default_lease_us = 5 * SECOND;
    fresh.max_grace_us = SECOND;
    ck_assert_int_eq(srv_sessions_set_limits(sessions, &fresh), DSA_OK);
    ck_assert_uint_eq(srv_sessions_count(sessions), 3); /* what is open stays */
    ck_assert_int_eq(srv_session_open(sessions, token_of(4), "", 0, 0, 0, &session, &err), DSA_E_LIMIT);
    ck_assert_int_eq(srv_session_open(sessions, token_of(4), "", 5 * SECOND + 1, 0, 0, &session, &err),
                     DSA_E_BAD_RANGE);
    ck_assert_int_eq(srv_session_open(sessions, token_of(4), "", 0, SECOND + 1, 0, &session, &err),
                     DSA_E_BAD_RANGE);
    fresh.max_sessions = 0;
    ck_assert_int_eq(srv_sessions_set_limits(sessions, &fresh), DSA_E_BAD_REQUEST);
    fresh.max_sessions = 5;
    ck_assert_int_eq(srv_sessions_set_limits(sessions, &fresh), DSA_OK);
    session = open_at(sessions, 4, 0, 0, 0);
    ck_assert_uint_eq(session->lease_us, 5 * SECOND);
    srv_sessions_destroy(sessions);
}
END_TEST

START_TEST(a_long_name_is_cut)
{
    struct srv_sessions *sessions = new_sessions();
    struct srv_session *session;
    char name[200];

    memset(name, 'n', sizeof(name));
    name[199] = '\0';
    ck_assert_int_eq(srv_session_open(sessions, token_of(1), name, 0, 0, 0, &session, NULL), DSA_OK);
    ck_assert_uint_eq(strlen(session->name), sizeof(session->name) - 1);
    srv_sessions_destroy(sessions);
}
END_TEST

START_TEST(a_lease_runs_out_unless_a_heartbeat_renews_it)
{
    struct srv_sessions *sessions = new_sessions();
    struct srv_session *a = open_at(sessions, 1, 10 * SECOND, 0, 0),
                       *b = open_at(sessions, 2, 10 * SECOND, 0, 1);

    ck_assert_uint_eq(srv_sessions_next_expiry(sessions), 10 * SECOND);
    srv_session_heartbeat(sessions, a, 9 * SECOND);
    ck_assert_uint_eq(srv_sessions_next_expiry(sessions), 10 * SECOND + 1);
    ck_assert_ptr_null(srv_session_next_expired(sessions, 10 * SECOND));
    ck_assert_ptr_eq(srv_session_next_expired(sessions, 10 * SECOND + 1), b);
    srv_session_close(sessions, b);
    ck_assert_ptr_null(srv_session_next_expired(sessions, 19 * SECOND - 1));
    ck_assert_ptr_eq(srv_session_next_expired(sessions, UINT64_MAX), a);
    srv_session_close(sessions, a);
    ck_assert_uint_eq(srv_sessions_next_expiry(sessions), UINT64_MAX);
    ck_assert_ptr_null(srv_session_next_expired(sessions, UINT64_MAX));
    srv_sessions_destroy(sessions);
}
END_TEST

START_TEST(a_time_that_would_wrap_is_never)
{
    struct srv_sessions *sessions = new_sessions();
    struct srv_session *session = open_at(sessions, 1, 0, 0, UINT64_MAX - 1);

    ck_assert_uint_eq(session->expires_us, UINT64_MAX);
    srv_sessions_destroy(sessions);
}
END_TEST

START_TEST(a_lost_stream_waits_in_grace_and_comes_back)
{
    struct srv_sessions *sessions = new_sessions();
    struct srv_session *session = open_at(sessions, 1, 20 * SECOND, 5 * SECOND, 0), *found = NULL;
    uint64_t number = session->number;

    ck_assert_int_eq(srv_session_reattach(sessions, token_of(1), SRV_TOKEN_BYTES, SECOND, &found, NULL),
                     DSA_E_PRECONDITION);
    ck_assert(srv_session_lost(sessions, session, 2 * SECOND));
    ck_assert_uint_eq(session->expires_us, 7 * SECOND);
    ck_assert(srv_session_lost(sessions, session, 6 * SECOND)); /* again: the grace that runs goes on */
    srv_session_heartbeat(sessions, session, 6 * SECOND);       /* late: it does not end the grace */
    ck_assert_uint_eq(srv_sessions_next_expiry(sessions), 7 * SECOND);
    ck_assert_int_eq(find(sessions, token_of(1), &found), DSA_OK);
    ck_assert(found->in_grace);
    ck_assert_int_eq(srv_session_reattach(sessions, token_of(2), SRV_TOKEN_BYTES, 6 * SECOND, &found, NULL),
                     DSA_E_NO_SESSION);
    ck_assert_int_eq(srv_session_reattach(sessions, token_of(1), SRV_TOKEN_BYTES, 6 * SECOND, &found, NULL),
                     DSA_OK);
    ck_assert_ptr_eq(found, session);
    ck_assert_uint_eq(found->number, number);
    ck_assert(!found->in_grace);
    ck_assert_uint_eq(found->expires_us, 26 * SECOND);
    srv_sessions_destroy(sessions);
}
END_TEST

START_TEST(grace_that_is_over_is_over_before_the_sweep)
{
    struct srv_sessions *sessions = new_sessions();
    struct srv_session *session = open_at(sessions, 1, 0, 5 * SECOND, 0), *found = NULL;

    ck_assert(srv_session_lost(sessions, session, SECOND));
    ck_assert_int_eq(srv_session_reattach(sessions, token_of(1), SRV_TOKEN_BYTES, 6 * SECOND, &found, NULL),
                     DSA_E_NO_SESSION);
    ck_assert_ptr_null(found);
    ck_assert_ptr_eq(srv_session_next_expired(sessions, 6 * SECOND), session);
    srv_sessions_destroy(sessions);
}
END_TEST

START_TEST(without_grace_a_lost_stream_is_the_end)
{
    struct srv_sessions *sessions = new_sessions();
    struct srv_session *session = open_at(sessions, 1, 0, 0, 0), *found;

    ck_assert(!srv_session_lost(sessions, session, SECOND));
    ck_assert(!session->in_grace);
    srv_session_close(sessions, session);
    ck_assert_int_eq(find(sessions, token_of(1), &found), DSA_E_NO_SESSION);
    srv_sessions_destroy(sessions);
}
END_TEST

START_TEST(numbers_are_never_used_again)
{
    struct srv_sessions *sessions = new_sessions();
    uint64_t last = 0;

    for (int i = 0; i < 1000; i++) {
        struct srv_session *session = open_at(sessions, i % 250, 0, 0, 0);

        ck_assert_uint_gt(session->number, last);
        last = session->number;
        srv_session_close(sessions, session);
        ck_assert_ptr_null(srv_session_by_number(sessions, last));
    }
    srv_sessions_destroy(sessions);
}
END_TEST

static void count_session(struct srv_session *session, void *arg)
{
    session->n_regions++;
    ++*(int *)arg;
}

START_TEST(each_meets_every_session_once)
{
    struct srv_sessions *sessions = new_sessions();
    struct srv_session *a = open_at(sessions, 1, 0, 0, 0), *b = open_at(sessions, 2, 0, 0, 0);
    int n = 0;

    srv_sessions_each(sessions, count_session, &n);
    ck_assert_int_eq(n, 2);
    ck_assert_uint_eq(a->n_regions, 1);
    ck_assert_uint_eq(b->n_regions, 1);
    srv_sessions_destroy(sessions);
}
END_TEST

/* Many sessions on a fake clock: they end exactly when the plainest model says, in order of time. */
START_TEST(random_life_on_a_fake_clock_matches_the_model)
{
    enum { N = 100, STEPS = 20000 };
    struct srv_session_config many = config;
    struct kit_rng rng = {test_seed()};
    struct srv_sessions *sessions;
    struct srv_session *open[N] = {NULL}, *session;
    uint64_t ends[N] = {0}, now = 0;

    many.max_sessions = N;
    ck_assert_int_eq(srv_sessions_create(&many, &sessions), DSA_OK);
    for (int step = 0; step < STEPS; step++) {
        int i = (int)kit_below(&rng, N);
        uint64_t first = UINT64_MAX;

        now += kit_below(&rng, 200000);
        if (!open[i]) {
            uint64_t lease = 1 + kit_below(&rng, 20 * SECOND);

            open[i] = open_at(sessions, i, lease, kit_chance(&rng, 500) ? 5 * SECOND : 0, now);
            ends[i] = now + lease;
        } else if (kit_chance(&rng, 700)) {
            srv_session_heartbeat(sessions, open[i], now);
            ends[i] = open[i]->in_grace ? ends[i] : now + open[i]->lease_us;
        } else if (open[i]->in_grace) {
            dsa_status status =
                srv_session_reattach(sessions, token_of(i), SRV_TOKEN_BYTES, now, &session, NULL);

            ck_assert_int_eq(status, ends[i] <= now ? DSA_E_NO_SESSION : DSA_OK);
            ends[i] = status == DSA_OK ? now + open[i]->lease_us : ends[i];
        } else if (srv_session_lost(sessions, open[i], now)) {
            ends[i] = now + 5 * SECOND;
        } else {
            srv_session_close(sessions, open[i]);
            open[i] = NULL;
        }
        while ((session = srv_session_next_expired(sessions, now)) != NULL) {
            int k = session->token[SRV_TOKEN_BYTES - 1];

            ck_assert_ptr_eq(open[k], session);
            ck_assert_uint_le(ends[k], now);
            open[k] = NULL;
            srv_session_close(sessions, session);
        }
        for (int k = 0; k < N; k++)
            if (open[k] && ends[k] < first)
                first = ends[k];
        if (first <= now || srv_sessions_next_expiry(sessions) != first)
            ck_abort_msg("step %d: the next expiry is not the model's", step);
    }
    srv_sessions_destroy(sessions);
}
END_TEST

static const char *scenario(void)
{
    struct srv_session_config many = config;
    struct srv_sessions *sessions = NULL;
    struct srv_session *session = NULL, *found;

    many.max_sessions = 40;
    TRY(srv_sessions_create(&many, &sessions), sessions == NULL);
    for (int i = 0; i < 40; i++) {
        session = NULL;
        TRY(srv_session_open(sessions, token_of(i), "x", 0, 0, 0, &session, NULL),
            session == NULL && srv_sessions_count(sessions) == (uint32_t)i
                && find(sessions, token_of(i), &found) == DSA_E_NO_SESSION);
    }
    for (int i = 0; i < 40; i++)
        NEED(find(sessions, token_of(i), &found) == DSA_OK && found->number == (uint64_t)i + 1);
    srv_sessions_destroy(sessions);
    return NULL;
}

START_TEST(any_allocation_may_fail)
{
    kit_sweep(scenario);
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    Suite *suite = suite_create("session");
    TCase *tc = tcase_create("session");

    (void)max;
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, bad_limits_are_refused);
    tcase_add_test(tc, an_open_session_is_found_by_token_and_number);
    tcase_add_test(tc, a_token_wrong_in_any_one_bit_is_not_found);
    tcase_add_test(tc, tokens_with_one_key_are_told_apart);
    tcase_add_test(tc, refusals_name_the_limit);
    tcase_add_test(tc, limits_can_change);
    tcase_add_test(tc, a_long_name_is_cut);
    tcase_add_test(tc, a_lease_runs_out_unless_a_heartbeat_renews_it);
    tcase_add_test(tc, a_time_that_would_wrap_is_never);
    tcase_add_test(tc, a_lost_stream_waits_in_grace_and_comes_back);
    tcase_add_test(tc, grace_that_is_over_is_over_before_the_sweep);
    tcase_add_test(tc, without_grace_a_lost_stream_is_the_end);
    tcase_add_test(tc, numbers_are_never_used_again);
    tcase_add_test(tc, each_meets_every_session_once);
    tcase_add_test(tc, random_life_on_a_fake_clock_matches_the_model);
    tcase_add_test(tc, any_allocation_may_fail);
    suite_add_tcase(suite, tc);
    suites_p[0] = suite;
    return 1;
}
