#!/usr/bin/python3
"""test_reload.py - SIGHUP: what changes in a server that runs, what does not, and that calls never notice."""

import json

from busy import *  # noqa: F403

AGAIN = "configuration read again"


class Configured:
    """A server whose settings file can be rewritten. Each reload leaves one more line of the kind that is waited for."""

    def __init__(self, env, text, **flags):
        self.path = os.path.join(tempfile.mkdtemp(prefix="dsa-reload-"), "dsad.yaml")
        self.write(text)
        self.server = env.start(config=self.path, **flags)

    def write(self, text):
        """Whole or not at all, as an operator's tools do it."""
        with open(self.path + ".new", "w") as f:
            f.write(text)
        os.rename(self.path + ".new", self.path)

    def reload(self, text=None, says=AGAIN):
        n = self.server.text().count(says)
        if text is not None:
            self.write(text)
        self.server.signal(signal.SIGHUP)
        wait_until(lambda: self.server.text().count(says) > n, 20 * SLOW, "the server says %r" % says)
        return self.server.text()

    def limits(self):
        return self.server.control.call("GetCapabilities").limits


def attend_rows(rng, session, sequence, n):
    session.attend(sequence, random_q(rng, n, 8), np.zeros((n, 8), np.int32))


@test(own=True)
def limits_and_level_change(env, rng):
    dsad = Configured(env, "max-rows: 100\nmax-sessions: 3\nmax-inflight: 9\nmax-regions: 2\nlog-level: info\nspin: 0us\n")
    first, second = dsad.server.session(), dsad.server.session()
    sequence = first.create()
    first.append(sequence, random_rows(rng, 4))
    attend_rows(rng, first, sequence, 100)
    log = dsad.reload("max-rows: 50\nmax-sessions: 2\nmax-inflight: 30\nmax-regions: 1\nlog-level: debug\nspin: 7us\nstall-timeout: 9s\n")
    for line in ("name=max-rows old=100 new=50", "name=max-sessions old=3 new=2", "name=max-inflight old=9 new=30",
                 "name=log-level old=info new=debug", "name=stall-timeout old=30000000us new=9000000us",
                 "only a restart changes it name=spin value=0us wanted=7us", AGAIN + " changed=6 kept=1"):
        truth(line in log, "the log does not say %r:\n%s" % (line, log))
    limits = dsad.limits()
    equal((limits.max_rows, limits.max_sessions, limits.max_inflight_per_stream), (50, 2, 30), "limits")
    equal(limits.stall_timeout_us, 9000000, "stall_timeout_us")
    attend_rows(rng, first, sequence, 50)
    expect_refusal(lambda: attend_rows(rng, first, sequence, 51), "TOO_LARGE", "attend.segments")
    in_log(dsad.server, "debug attend refused")
    expect_refusal(lambda: dsad.server.session(), "LIMIT")
    second.create()  # what is open stays
    second.region(4096)
    expect_refusal(lambda: second.region(4096), "LIMIT", "max_regions_per_session")
    dsad.reload("max-rows: 101\nmax-sessions: 3\n")  # above what the server was built for
    in_log(dsad.server, "above its value at the start only a restart sets it name=max-rows value=50 wanted=101")
    equal(dsad.limits().max_rows, 50, "max_rows")
    dsad.reload("max-rows: 100\nmax-sessions: 3\n")
    attend_rows(rng, first, sequence, 100)
    third = dsad.server.session()
    equal(dsad.limits().max_inflight_per_stream, 256, "what the file leaves out is the default again")
    dsad.reload("max-rows: 100\nmax-sessions: 3\nlog-format: json\n")
    dsad.reload()
    again = json.loads([line for line in dsad.server.text().splitlines() if AGAIN in line][-1])
    equal((again["changed"], again["kept"]), (0, 0), "counts")
    for s in (first, second, third):
        s.close()


@test(own=True)
def a_bad_file_changes_nothing(env, rng):
    dsad = Configured(env, "max-rows: 100\nmax-sessions: 3\n")
    dsad.server.expect_error("configuration refused")
    refused = "configuration refused, everything stays as it is"
    before = dsad.limits()
    for text, words in (
        ("max-rows: 50\nmax-sesions: 2\n", ("max-sesions", "line 2", "nearest is max-sessions")),
        ("max-rows: 50\nmax-sessions: many\n", ("max-sessions", "line 2", "many")),
        ("max-rows: 50\n\nmax-sessions: 0\n", ("max-sessions", "line 3")),
        ("max-rows: 50\nlease: 700s\n", ("lease", "at most max-lease")),
        ("max-rows: [50]\n", ("max-rows", "line 1")),
        ("max-rows: 50\nlog-level: loud\n", ("log-level", "loud")),
        ("max-rows: 50\nlog-format: xml\n", ("log-format", "xml")),
        ("max-rows: 50\n: :\n\t-", ("line 2", "not YAML")),
    ):
        log = dsad.reload(text, refused)
        line = [l for l in log.splitlines() if refused in l][-1]
        for word in words:
            truth(word in line, "the refusal of %r does not name %r: %s" % (text, word, line))
        equal(dsad.limits(), before, "limits after %r" % text)
    os.unlink(dsad.path)
    dsad.reload(says=refused)
    equal(dsad.limits(), before, "limits without a file")
    dsad.reload("max-rows: 60\nmax-sessions: 3\n")
    equal(dsad.limits().max_rows, 60, "max_rows of a good file")


@test(own=True)
def flags_win_every_time(env, rng):
    dsad = Configured(env, "max-inflight: 5\n", max_inflight=7)
    dsad.reload("max-inflight: 6\n")
    in_log(dsad.server, AGAIN + " changed=0 kept=0")
    equal(dsad.limits().max_inflight_per_stream, 7, "max_inflight")


@test(own=True)
def a_shorter_stall_timeout_holds_for_streams_that_run(env, rng):
    dsad = Configured(env, "stall-timeout: 600s\n")
    session = dsad.server.session()
    sequence = session.create()
    for _ in range(3):
        session.append(sequence, np.tile(random_rows(rng, 500), (7, 1)))
    stalled = dsad.server.client().export(
        pb.ExportRowsRequest(session=session.token, sequence_id=sequence, dtype=pb.DTYPE_BF16)
    )
    dsad.reload("stall-timeout: 1ms\n")
    in_log(dsad.server, "stream ended, its client does not read method=/dsa.v1.SparseAttention/ExportRows", 20 * SLOW)
    stalled.cancel()
    session.close()


@test(own=True)
def a_storm_of_sighups_under_load(env, rng):
    """Every answer is right, whatever is read meanwhile."""
    texts = ["max-rows: 200\nmax-inflight: 64\nlog-level: info\n", "max-rows: 300\nmax-inflight: 32\nlog-level: warn\n"]
    dsad = Configured(env, texts[1])
    server, stop, answers, failures = dsad.server, threading.Event(), [], []

    def work(seed):
        mine = np.random.default_rng(seed)
        try:
            with server.session() as session:
                sequence = session.create()
                session.append(sequence, random_rows(mine, 8))
                while not stop.is_set():
                    attend_rows(mine, session, sequence, 20)
                    session.get(sequence)
                    answers.append(1)
        except BaseException as error:  # noqa: B902
            failures.append(error)

    workers = [threading.Thread(target=work, args=(int(rng.integers(1 << 30)),)) for _ in range(3)]
    for worker in workers:
        worker.start()
    wait_until(lambda: len(answers) > 20 or failures, 60 * SLOW, "load is on")
    begin = len(answers)
    for i in range(full(1000, 100)):
        if i % 10 == 0:
            dsad.write(texts[i // 10 % 2])
        server.signal(signal.SIGHUP)
    wait_until(lambda: len(answers) > begin + 20 or failures, 60 * SLOW, "answers come after the storm")
    dsad.write(texts[0])
    server.signal(signal.SIGHUP)
    wait_until(lambda: dsad.limits().max_rows == 200, 20 * SLOW, "the last file holds")
    stop.set()
    for worker in workers:
        worker.join()
    truth(not failures, "a call failed: %r" % failures[:1])
    server.expect_empty()
    server.stop()
    print("     %d answers meanwhile" % (len(answers) - begin))


if __name__ == "__main__":
    main()
