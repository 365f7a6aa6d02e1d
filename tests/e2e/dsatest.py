"""dsatest.py - harness of the end-to-end tests: an independent client of dsad, and a runner.

Nothing here shares code with the server or with libdsa: the stubs are generated from proto/ when the tests start,
and the reference arithmetic is numpy, written from the format's description alone.

A test is a function marked with @test(...); the runner starts the dsad that it asks for, runs it, and then checks
that nothing stayed behind (pages, sequences, regions, sessions), that the server still answers, that its log has no
error line which the test did not announce, and that it leaves with exit code 0. No test sleeps for a fixed time in
order to synchronise: wait_until polls against a deadline.
"""

import argparse
import traceback
import zlib

from dsaclient import *  # noqa: F403

# ---- server ----


class Hooks:
    """The words of a file shared with dsad-hooked; hooks.h says what each does. Written and read as 64-bit words."""

    NAMES = "gate n_entered n_left delay_ns launch_fail open_gate n_opening alloc_fail n_allocs".split()

    def __init__(self):
        with tempfile.NamedTemporaryFile(prefix="dsa-hooks-", delete=False) as f:
            f.truncate(4096)
            self.path = f.name
            self.map = mmap.mmap(f.fileno(), 4096)
        object.__setattr__(self, "words", np.frombuffer(self.map, np.int64))

    def __getattr__(self, name):
        if name not in Hooks.NAMES:
            raise AttributeError(name)
        return int(self.words[Hooks.NAMES.index(name)])

    def __setattr__(self, name, value):
        if name in Hooks.NAMES:
            self.words[Hooks.NAMES.index(name)] = value
        else:
            object.__setattr__(self, name, value)

    def remove(self):
        os.unlink(self.path)


SANITIZER_REPORT = re.compile(
    r"ERROR: (Address|Leak)Sanitizer|WARNING: ThreadSanitizer|runtime error:|SUMMARY: \w+San"
)
ERROR_LINE = re.compile(r'^\S+Z error |^E\d{4} |^\{"ts":"[^"]*","level":"error",', re.M)


class Server:
    """A dsad on a unix socket in a temporary folder. `flags` replace the defaults by name. With hooked=True, or the
    first values of its words, it is dsad-hooked, whose launches and allocations the test governs through `hooks`."""

    DEFAULTS = {"layers": "1", "pool-pages": "256", "cpu-threads": "2", "max-lease": "600s"}

    def __init__(self, env, folder=None, nofile=None, wrapper=(), hooked=False, **flags):
        self.env = env
        self.hooks = Hooks() if hooked else None
        for name, value in hooked.items() if isinstance(hooked, dict) else ():
            setattr(self.hooks, name, value)
        self.folder = folder or tempfile.mkdtemp(prefix="dsa-e2e-")
        self.path = os.path.join(self.folder, "d.sock")
        self.log_path = os.path.join(self.folder, "log.%d" % time.monotonic_ns())
        self.expected_errors = []
        options = {"listen": "unix:" + self.path, **self.DEFAULTS}
        options.update({k.replace("_", "-"): str(v) for k, v in flags.items()})
        program = env.hooked if hooked else env.dsad
        command = [*wrapper, program] + [x for k, v in options.items() for x in ("--" + k, v)]
        command = [x for x in command if x != "true"] if "true" in command else command
        command = with_files(nofile, command) if nofile else command
        self.log = open(self.log_path, "wb")
        environment = dict(os.environ)
        environment.setdefault(
            "TSAN_OPTIONS", "suppressions=%s:exitcode=66" % os.path.join(ROOT, "tests", "tsan.supp")
        )
        if hooked:
            environment["DSA_TEST_HOOKS"] = self.hooks.path
        self.process = subprocess.Popen(
            command,
            stdout=self.log,
            stderr=self.log,
            stdin=subprocess.DEVNULL,
            close_fds=True,
            env=environment,
        )
        env.servers.append(self)
        self.control = None

    def wait_ready(self):
        def answers():
            if self.process.poll() is not None:
                fail("dsad ended at start with code %d:\n%s" % (self.process.returncode, self.text()))
            probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                probe.connect(self.path)
                return True
            except OSError:
                return False
            finally:
                probe.close()

        wait_until(answers, 10 * SLOW, "dsad listens")
        self.control = self.client()
        self.capabilities = self.control.call("GetCapabilities")
        return self

    def client(self):
        return Client("unix:" + self.path)

    def session(self, **options):
        return Session(self.client(), **options)

    @property
    def port(self):
        """Of its TCP address, which the flag tcp=127.0.0.1:0 leaves to the system."""
        return int(re.search(r"tcp port=(\d+)", self.text()).group(1))

    def text(self):
        self.log.flush()
        with open(self.log_path, errors="replace") as f:
            return f.read()

    def expect_error(self, pattern):
        """Announces error lines that this test causes."""
        self.expected_errors.append(re.compile(pattern))

    def check_log(self):
        text = self.text()
        report = SANITIZER_REPORT.search(text)
        if report:
            fail("sanitizer report:\n" + text[max(0, report.start() - 200) : report.start() + 6000])
        for line in text.splitlines():
            if ERROR_LINE.match(line) and not any(p.search(line) for p in self.expected_errors):
                fail("unexpected error line: " + line)

    def rss(self):
        with open("/proc/%d/statm" % self.process.pid) as f:
            return int(f.read().split()[1]) * mmap.PAGESIZE

    def n_fds(self):
        return len(os.listdir("/proc/%d/fd" % self.process.pid))

    def n_maps(self):
        with open("/proc/%d/maps" % self.process.pid) as f:
            return sum(1 for _ in f)

    def is_empty(self):
        stats = self.control.stats()
        pool = stats.pools[0]
        return (
            stats.n_sessions,
            stats.n_regions,
            stats.region_bytes,
            pool.n_pages_used,
            pool.n_sequences,
            pool.queue_depth,
            pool.page_refs,
            pool.n_pages_shared,
        ) == (0,) * 8

    def expect_empty(self, timeout=1.0 * SLOW):
        try:
            wait_until(self.is_empty, timeout, "all is back in the pool")
        except Failure as failed:
            fail("%s; stats: %r" % (failed, self.control.stats()))
        pool = self.control.pool()
        equal(pool.n_pages_free, pool.n_pages, "free pages")

    def expect_working(self):
        """A whole round through a session of its own gives the right numbers."""
        rng = np.random.default_rng(7)
        layout = LAYOUTS[self.capabilities.pools[0].layout - 1]
        with self.session(name="check") as s:
            rows, q = random_rows(rng, 70, layout), random_q(rng, 2, 3, layout)
            indices = random_indices(rng, 2, 40, 70)
            sequence = s.create()
            for part in range(0, 70, 14):  # below the smallest limits of any test
                s.append(sequence, rows[part : part + 14])
            stream = AttendStream(s, layout)
            result = stream.attend(sequence, q, indices, want_lse=True)
            kv = s.export(sequence, dtype=pb.DTYPE_BF16, layout=layout)
            check_attend(result, *attend_reference(layout, q, kv, indices, 0.05), "working check")
            stream.close()

    def signal(self, number=signal.SIGTERM):
        self.process.send_signal(number)

    def wait_exit(self, timeout):
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            fail("dsad did not end within %.1f s; log:\n%s" % (timeout, self.text()[-3000:]))

    def stop(self, timeout=5.0 * SLOW):
        """SIGTERM, exit code 0 in time, clean log, sockets gone."""
        if self.control is not None:
            self.control.close()
        self.signal()
        code = self.wait_exit(timeout)
        self.check_log()
        equal(code, 0, "exit code of dsad (log: %s)" % self.text()[-2000:])
        for path in (self.path, self.path + ".fd"):
            truth(not os.path.exists(path), "%s is still there after the end" % path)

    def destroy(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.log.close()
        if self.hooks is not None:
            self.hooks.remove()
        subprocess.run(["rm", "-rf", self.folder], check=False)


# ---- runner ----

TESTS = []


def test(**flags):
    """Marks a test. It gets (server, rng); tests with the same flags share a server. own=True: it gets (env, rng)
    and starts what it needs itself. settle=False: the checks afterwards are the test's own."""
    own, settle = flags.pop("own", False), flags.pop("settle", True)

    def mark(function):
        TESTS.append((function, own, settle, flags))
        return function

    return mark


class Env:
    def __init__(self, dsad, seed, hooked=None, storm=None, dsactl=None):
        self.dsad, self.seed, self.servers = dsad, seed, []
        self.hooked, self.storm = hooked, storm  # programs of this folder, built beside the server
        self.dsactl = dsactl
        self.shared, self.shared_flags = None, None

    def start(self, **options):
        return Server(self, **options).wait_ready()

    def share(self, flags):
        if self.shared is not None and (self.shared_flags != flags or self.shared.process.poll() is not None):
            self.retire()
        if self.shared is None:
            self.shared, self.shared_flags = self.start(**flags), flags
        return self.shared

    def retire(self):
        server, self.shared = self.shared, None
        if server is not None:
            server.stop()
            self.forget(server)

    def forget(self, server):
        server.destroy()
        self.servers.remove(server)

    def sweep(self):
        """Ends what a test left, apart from the shared server."""
        for server in list(self.servers):
            if server is not self.shared:
                self.forget(server)
        while FOLDERS:
            subprocess.run(["rm", "-rf", FOLDERS.pop()], check=False)


def _run(env, function, own, settle, flags):
    rng = np.random.default_rng(env.seed ^ zlib.crc32(function.__name__.encode()))
    if own:
        env.retire()
        function(env, rng)
        for server in list(env.servers):
            server.check_log()
        return
    server = env.share(flags)
    function(server, rng)
    if settle:
        server.expect_empty()
        server.expect_working()
        server.expect_empty()
    server.check_log()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dsad", default=os.environ.get("DSAD"))
    parser.add_argument("--hooked", default=os.environ.get("DSAD_HOOKED"), help="dsad-hooked")
    parser.add_argument("--storm", default=os.environ.get("DSA_STORM"), help="dsa-storm")
    parser.add_argument("--dsactl", default=os.environ.get("DSACTL"), help="dsactl")
    parser.add_argument("--seed", type=int, default=int(os.environ.get("DSA_TEST_SEED", "20260101")))
    parser.add_argument("-k", default="", help="run only tests whose name contains this")
    parser.add_argument("-v", action="store_true")
    options = parser.parse_args()
    if not options.dsad:
        parser.error("give --dsad or DSAD")
    n_passed = n_failed = n_skipped = 0
    beside = os.path.join(os.path.dirname(os.path.abspath(options.dsad)), "..", "tests", "e2e")
    env = Env(
        options.dsad,
        options.seed,
        options.hooked or os.path.join(beside, "dsad-hooked"),
        options.storm or os.path.join(beside, "dsa-storm"),
        options.dsactl or os.path.join(beside, "..", "..", "client", "dsactl"),
    )
    print("seed %d, sanitized %d" % (options.seed, SANITIZED))
    for item in TESTS + [None]:
        name = item[0].__name__ if item else "last server stops"
        if item and options.k not in name:
            continue
        begin = time.monotonic()
        try:
            if item:
                _run(env, *item)
            else:
                env.retire()
            n_passed += 1
            if options.v:
                print("ok   %s %.2f s" % (name, time.monotonic() - begin))
        except Skip as reason:
            n_skipped += 1
            print("SKIP %s: %s" % (name, reason))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            n_failed += 1
            print("FAIL %s (seed %d): %s" % (name, options.seed, error))
            frames = traceback.extract_tb(error.__traceback__)
            print(
                "".join(
                    "    %s:%d %s\n" % (os.path.basename(f.filename), f.lineno, f.line) for f in frames[-5:]
                ),
                end="",
            )
            for server in list(env.servers):
                code = server.process.poll()
                tail = server.text()[-600 if code in (None, 0) else -6000 :]
                print("    dsad[%s]: %s" % (code, tail.replace("\n", "\n    ")))
            for server in list(env.servers):  # the next test gets a fresh one
                env.forget(server)
            env.shared = None
        env.sweep()
        sys.stdout.flush()
    print("%d passed, %d failed, %d skipped" % (n_passed, n_failed, n_skipped))
    sys.stdout.flush()
    os._exit(1 if n_failed else 0)  # not sys.exit: gRPC's destructors can hang with cancelled streams
