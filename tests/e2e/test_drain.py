#!/usr/bin/python3
"""test_drain.py - SIGTERM a hundred times: under load, where no accepted request may be lost, and while the server starts."""

import threading

from busy import *  # noqa: F403

BEHIND = 12  # requests of a stream that are on their way at a time


class Sender:
    """Keeps BEHIND requests of a stream on their way until the server ends it. The server reads a stream in order, so what it
    accepted is a beginning of what was sent: every request up to the last one answered has exactly one answer."""

    def __init__(self, server, seed):
        rng = np.random.default_rng(seed)
        self.session = Session(server.client(), name="sender")
        self.sequence = self.session.create()
        self.session.append(self.sequence, random_rows(rng, 100))
        self.q, self.indices = random_q(rng, 1, 4), random_indices(rng, 1, 40, 100)
        self.expected = self.session.attend(self.sequence, self.q, self.indices).out_bits
        self.stream = AttendStream(self.session)
        self.n_ok, self.answers, self.problem = 0, {}, None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _ask(self):
        return self.stream.attend(self.sequence, self.q, self.indices, wait=False)

    def _take(self):
        piece = self.stream.bidi.recv(60 * SLOW)
        if piece is None:
            return False
        truth(piece.request_id not in self.answers, "request %d is answered twice" % piece.request_id)
        self.answers[piece.request_id] = piece
        return True

    def _run(self):
        try:
            for _ in range(BEHIND):
                self._ask()
            while self._take():
                self._ask()
        except grpc.RpcError as error:
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                self.problem = error
        except Exception as error:  # the stream is closed while it is written to
            if not isinstance(error, (ValueError, grpc.FutureCancelledError)) and "clos" not in str(error):
                self.problem = error

    def check(self):
        self.thread.join(60 * SLOW)
        truth(not self.thread.is_alive(), "the sender has ended")
        truth(self.problem is None, "unexpected: %r" % self.problem)
        last = max(self.answers, default=0)
        missing = [i for i in range(1, last + 1) if i not in self.answers]
        equal(missing, [], "requests without an answer, before %d" % last)
        n_ok = 0
        for piece in self.answers.values():
            if piece.HasField("status"):
                equal(piece.status.reason, "DRAINING", "the one reason to refuse")
            else:
                n_ok += 1
                same_bits(np.frombuffer(piece.out, np.uint16).reshape(self.expected.shape), self.expected, "under load")
        return n_ok


@test(own=True)
def hundred_sigterms_under_load_lose_nothing(env, rng):
    n_ok = 0
    for i in range(full(100, 12)):
        server = env.start(**{"drain-grace": "60s", "inline-flops": (0, 4000000)[i % 2]})
        senders = [Sender(server, int(rng.integers(1 << 30))) for _ in range(3)]
        target = int(rng.integers(5, 100))
        wait_until(lambda: all(len(s.answers) >= target for s in senders), 60 * SLOW, "load is on")
        server.signal()
        equal(server.wait_exit(20 * SLOW), 0, "exit code of run %d" % i)
        n_ok += sum(sender.check() for sender in senders)
        truth("cut off" not in server.text(), "run %d: %s" % (i, server.text()))
        server.check_log()
        for path in (server.path, server.path + ".fd"):
            truth(not os.path.exists(path), "%s is still there" % path)
        env.forget(server)
    print("     %d requests answered, 0 lost" % n_ok)


@test(own=True)
def drain_then_sigterm_under_load_loses_nothing(env, rng):
    """As with a preStop hook: Drain, and the signal at once."""
    for _ in range(scaled(10, 2)):
        server = env.start(**{"drain-grace": "60s"})
        senders = [Sender(server, int(rng.integers(1 << 30))) for _ in range(3)]
        wait_until(lambda: all(len(s.answers) >= 20 for s in senders), 60 * SLOW, "load is on")
        server.control.call("Drain", grace_us=60 * 10**6)
        server.signal()
        equal(server.wait_exit(20 * SLOW), 0, "exit code")
        for sender in senders:
            sender.check()
        env.forget(server)


@test(own=True)
def sigterm_in_the_first_milliseconds(env, rng):
    """Before main takes signals, one ends the process as any other; from then on it ends with 0. It never stays, and never leaves
    a socket behind."""
    ends = {}
    for i in range(full(100, 20)):
        server = Server(env)
        # A moment chosen at random is the point of this test; nothing is waited for.
        time.sleep(float(rng.random()) * 0.04 * SLOW)
        server.signal()
        code = server.wait_exit(20 * SLOW)
        truth(code in (0, -signal.SIGTERM), "exit code %d in run %d: %s" % (code, i, server.text()))
        ends[code] = ends.get(code, 0) + 1
        for path in (server.path, server.path + ".fd"):
            truth(not os.path.exists(path), "%s is still there (run %d)" % (path, i))
        server.check_log()
        env.forget(server)
    print("     ends: %r" % ends)
    truth(ends.get(0, 0) > 0, "every signal came before main: %r" % ends)


if __name__ == "__main__":
    main()
