#!/usr/bin/python3
"""overload.py - what overload costs in time: figures that a test must not judge. By hand, on an idle machine:

    tests/bench/overload.py --dsad build/release/server/dsad [--seconds 60]

1. A normal client alone, and beside 50 clients that each asked for an export and do not read.
2. Health checks on an idle server, and while the device hangs, the queue is full and 200 streams stall.
3. A normal client before a storm of 300 clients with 16 MiB answers, and in the five seconds after it.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "e2e"))

from dsatest import *  # noqa: E402,F403


def figures(what, times):
    times = sorted(times)
    at = lambda p: times[min(len(times) - 1, int(len(times) * p))] * 1e6  # noqa: E731
    print("%-40s n %6d  p50 %7.0f us  p99 %7.0f us  p99.9 %7.0f us" % (what, len(times), at(0.5), at(0.99), at(0.999)))


def timed(call, seconds):
    times, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        begin = time.monotonic()
        call()
        times.append(time.monotonic() - begin)
    return times


def fill(s, rng, n):
    sequence, rows = s.create(), np.tile(random_rows(rng, 50), (10, 1))
    for _ in range(n // 500):
        s.append(sequence, rows)
    return sequence


def slow_readers(env, rng, seconds):
    server = env.start(**{"pool-pages": 1024, "stall-timeout": "600s"})
    with server.session() as s:
        sequence = fill(s, rng, 50000)
        q, indices = random_q(rng, 1, 8), random_indices(rng, 1, 64, 50000, 0)
        figures("attend, alone", timed(lambda: s.attend(sequence, q, indices), seconds))
        request = pb.ExportRowsRequest(session=s.token, sequence_id=sequence, dtype=pb.DTYPE_BF16)
        clients = [server.client() for _ in range(50)]
        calls = [c.export(request, timeout=None) for c in clients]
        figures("attend, beside 50 slow readers", timed(lambda: s.attend(sequence, q, indices), seconds))
        for call in calls:
            call.cancel()
    server.stop()


def probes(env, rng, seconds):
    server = env.start(hooked=True, **{"pool-pages": 1024, "max-queue": 64, "inline-flops": 0})
    check = lambda: server.control.health()  # noqa: E731
    figures("health, idle", timed(check, seconds))
    with server.session() as s:
        sequence = fill(s, rng, 50000)
        q, indices = random_q(rng, 1, 8), random_indices(rng, 1, 64, 50000, 0)
        request = pb.ExportRowsRequest(session=s.token, sequence_id=sequence, dtype=pb.DTYPE_BF16)
        clients = [server.client() for _ in range(4)]
        calls = [c.export(request, timeout=None) for c in clients for _ in range(50)]
        wait_until(lambda: server.control.pool().queue_depth == 0, 30, "the exports stall")
        server.hooks.gate = 1
        asked = [s.attend(sequence, q, indices, wait=False) for _ in range(200)]
        figures("health, full queue and 200 stalled", timed(check, seconds))
        server.hooks.gate = 0
        for request_id in asked:
            try:
                s.stream.wait(request_id)
            except Refused:
                pass
        for call in calls:
            call.cancel()
    server.stop()


def after_a_storm(env, rng, seconds):
    server = env.start(
        nofile=8192,
        **{"pool-pages": 1024, "max-sessions": 512, "max-connections": 512, "max-queue-bytes": "256MiB"}
    )
    with server.session() as s:
        sequence = fill(s, rng, 1000)
        q, indices = random_q(rng, 1, 8), random_indices(rng, 1, 64, 1000, 0)
        figures("attend, before the storm", timed(lambda: s.attend(sequence, q, indices), 5))
        command = with_files(8192, [env.storm, "answers", "unix:" + server.path, "300"])
        print(subprocess.run(command, capture_output=True, text=True).stdout.strip())
        figures("attend, the five seconds after it", timed(lambda: s.attend(sequence, q, indices), 5))
    server.stop()


def run():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dsad", required=True)
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    beside = os.path.join(os.path.dirname(os.path.abspath(options.dsad)), "..", "tests", "e2e")
    env = Env(options.dsad, 1, os.path.join(beside, "dsad-hooked"), os.path.join(beside, "dsa-storm"))
    rng = np.random.default_rng(1)
    for step in (slow_readers, probes, after_a_storm):
        step(env, rng, options.seconds)
        env.sweep()


run()
sys.stdout.flush()
os._exit(0)
