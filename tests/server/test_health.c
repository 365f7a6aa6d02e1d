/* test_health.c - what the probes answer in each state; how observations fall into buckets. */
#include <string.h>

#include "server/health.h"
#include "server/meter.h"
#include "tests/support/test_main.h"

#define NOW UINT64_C(100000000)

static struct srv_health health;

static void expect(bool startup, bool ready, bool live, const char *why_not_ready)
{
    const char *why;

    ck_assert_int_eq(srv_health_ask(&health, SRV_PROBE_STARTUP, NOW, NULL), startup);
    ck_assert_int_eq(srv_health_ask(&health, SRV_PROBE_LIVE, NOW, NULL), live);
    ck_assert_int_eq(srv_health_ask(&health, SRV_PROBE_READY, NOW, &why), ready);
    ck_assert_str_eq(why, why_not_ready);
}

static void reset(void)
{
    memset(&health, 0, sizeof(health));
    srv_counter_set(&health.watchdog_us, 1000);
    srv_health_beat(&health, NOW, 0);
    atomic_store(&health.is_started, true);
}

START_TEST(each_state_has_its_answers)
{
    memset(&health, 0, sizeof(health));
    expect(false, false, true, "starting");
    reset();
    expect(true, true, true, "ok");
    atomic_store(&health.is_draining, true);
    expect(true, false, true, "draining");
    reset();
    atomic_store(&health.is_lost, true);
    expect(true, false, false, "device lost");
}
END_TEST

START_TEST(watchdog_looks_at_the_worker)
{
    reset();
    srv_health_beat(&health, NOW, NOW - 1000);
    expect(true, true, true, "ok");
    srv_health_beat(&health, NOW, NOW - 1001);
    expect(true, false, true, "worker stuck");
    srv_health_beat(&health, NOW, NOW - 1); /* at something else by now */
    expect(true, true, true, "ok");
    srv_health_beat(&health, NOW, NOW + 5); /* began after the clock was read */
    expect(true, true, true, "ok");
    srv_counter_set(&health.watchdog_us, 0);
    srv_health_beat(&health, NOW, 1);
    expect(true, true, true, "ok");
}
END_TEST

START_TEST(watchdog_looks_at_the_service_thread)
{
    reset();
    srv_counter_set(&health.beat_us, NOW - 1000);
    expect(true, true, true, "ok");
    srv_counter_set(&health.beat_us, NOW - 1001);
    expect(true, false, false, "service thread stuck");
    srv_counter_set(&health.watchdog_us, 0);
    expect(true, true, true, "ok");
}
END_TEST

START_TEST(observations_fall_into_their_buckets)
{
    struct srv_histogram h = {0};

    for (size_t i = 1; i < SRV_HISTOGRAM_BUCKETS; i++) {
        ck_assert_uint_gt(srv_bounds_us[i], srv_bounds_us[i - 1]);
        ck_assert_uint_eq(srv_bounds_rows[i], 2 * srv_bounds_rows[i - 1]);
    }
    srv_histogram_add(&h, srv_bounds_us, 0);
    srv_histogram_add(&h, srv_bounds_us, srv_bounds_us[0]); /* a bound belongs to its bucket */
    srv_histogram_add(&h, srv_bounds_us, srv_bounds_us[0] + 1);
    srv_histogram_add(&h, srv_bounds_us, srv_bounds_us[SRV_HISTOGRAM_BUCKETS - 1]);
    srv_histogram_add(&h, srv_bounds_us, UINT64_MAX / 2);
    ck_assert_uint_eq(srv_counter_get(&h.counts[0]), 2);
    ck_assert_uint_eq(srv_counter_get(&h.counts[1]), 1);
    ck_assert_uint_eq(srv_counter_get(&h.counts[2]), 0);
    ck_assert_uint_eq(srv_counter_get(&h.counts[SRV_HISTOGRAM_BUCKETS - 1]), 1);
    ck_assert_uint_eq(srv_counter_get(&h.counts[SRV_HISTOGRAM_BUCKETS]), 1);
}
END_TEST

int test_suites(Suite **suites_p, int max)
{
    TCase *tc = tcase_create("health");

    (void)max;
    tcase_add_test(tc, each_state_has_its_answers);
    tcase_add_test(tc, watchdog_looks_at_the_worker);
    tcase_add_test(tc, watchdog_looks_at_the_service_thread);
    tcase_add_test(tc, observations_fall_into_their_buckets);
    suites_p[0] = suite_create("health");
    suite_add_tcase(suites_p[0], tc);
    return 1;
}
