#!/usr/bin/python3
"""test_scale.py - calls by the hundred thousand, clients by the hundred, and memory that is not there."""

from busy import *  # noqa: F403


def storm(server, *arguments, timeout=300):
    """Runs dsa-storm against the server; returns what it counted."""
    command = with_files(8192, [server.env.storm, arguments[0], "unix:" + server.path, *map(str, arguments[1:])])
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    told = done.stdout + done.stderr
    truth(done.returncode == 0, "dsa-storm ended with %d and said %s" % (done.returncode, told[-3000:]))
    print("     " + done.stdout.strip())
    return {k: int(v) for k, v in (word.split("=") for word in done.stdout.split())}


# ---- cancels ----


@test(hooked=True)
def two_hundred_thousand_calls_race_with_their_ends(server, rng):
    """NET-03: deadlines of 0.5 to 1.5 times the median, cancels at every moment, launches that take a while."""
    server.hooks.delay_ns = 20000
    n = full(200000, 50000)
    counts = storm(server, "cancels", n, int(rng.integers(1 << 30)))
    equal(counts["ok"] + counts["late"] + counts["cancelled"], n, "every call has one outcome")
    for outcome in ("ok", "late", "cancelled"):
        truth(counts[outcome] > 0, "no call was %s: the test is too tame (%r)" % (outcome, counts))
    server.hooks.delay_ns = 0


@test(hooked=True, **{"inline-flops": 0})
def unary_calls_race_with_their_deadlines(server, rng):
    """NET-03, unary: appends whose client gives up around the median; each is done once or not at all."""
    server.hooks.delay_ns = 20000
    with server.session() as s:
        sequence = s.create()
        rows = random_rows(rng, 1)
        request = pb.AppendRequest(session=s.token, append=pb.AppendOp(sequence_id=sequence, rows=inline(rows)))
        method = s.client.channel.unary_unary(
            "/%s/Append" % SERVICE,
            request_serializer=serialize,
            response_deserializer=pb.AppendReply.FromString,
        )
        times = []
        for _ in range(101):
            begin = time.monotonic()
            method(request)
            times.append(time.monotonic() - begin)
        median = sorted(times)[50]
        n, outcomes, waiting = full(10000, 1000), {"OK": 101}, []

        def settle(call):
            try:
                call.result()
                outcome = "OK"
            except grpc.FutureCancelledError:
                outcome = "CANCELLED"
            except grpc.RpcError as error:
                outcome = error.code().name
            truth(outcome in ("OK", "CANCELLED", "DEADLINE_EXCEEDED"), "outcome %s" % outcome)
            outcomes[outcome] = outcomes.get(outcome, 0) + 1

        for _ in range(n):
            waiting.append(method.future(request, timeout=float(rng.uniform(0.5, 1.5)) * median))
            if rng.random() < 0.1:
                waiting[int(rng.integers(0, len(waiting)))].cancel()
            if len(waiting) >= 4:
                settle(waiting.pop(0))
        for call in waiting:
            settle(call)
        equal(sum(outcomes.values()), n + 101, "every call has one outcome: %r" % outcomes)
        server.hooks.delay_ns = 0
        wait_until(lambda: server.control.pool().queue_depth == 0, 5 * SLOW, "the queue is empty")
        tokens = s.get(sequence).n_tokens
        truth(outcomes["OK"] <= tokens <= n + 101, "%d tokens after %r" % (tokens, outcomes))
        same_bits(s.export(sequence), np.tile(quantize(MAIN, rows)[0], (tokens, 1)), "each append whole")


# ---- memory that is not there ----


class MemoryGroup:
    """A memory group of the kernel (cgroup v1 or v2) with a limit, and a way to start a process in it."""

    PLACES = (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        ("/sys/fs/cgroup", "memory.max"),
        ("/sys/fs/cgroup/unified", "memory.max"),
    )

    def __init__(self, limit):
        self.folder = None
        for place, name in MemoryGroup.PLACES:
            folder = os.path.join(place, "dsa-test-%d" % os.getpid())
            try:
                os.mkdir(folder)
            except OSError:
                continue
            try:
                with open(os.path.join(folder, name), "w") as f:
                    f.write(str(limit))
                self.folder = folder
                return
            except OSError:
                os.rmdir(folder)
        raise OSError("no memory group can be made here")

    def wrapper(self):
        return ["sh", "-c", 'echo $$ >"$0/cgroup.procs" && exec "$@"', self.folder]

    def peak(self):
        for name in ("memory.max_usage_in_bytes", "memory.peak"):
            if os.path.exists(os.path.join(self.folder, name)):
                with open(os.path.join(self.folder, name)) as f:
                    return "%d MiB" % (int(f.read()) >> 20)
        return "unknown"

    def remove(self):
        wait_until(self._try_remove, 10, "the memory group is empty")

    def _try_remove(self):
        try:
            os.rmdir(self.folder)
            return True
        except OSError:
            return False


@test(own=True)
def answers_larger_than_memory(env, rng):
    """OPS-03: 500 clients each ask for 16 MiB and do not read, in 1 GiB: refused with a hint or served, never killed."""
    n, group = full(500, 20), None
    limit = 1 << 30
    flags = {
        "pool-pages": 2 * n,
        "max-sessions": n + 8,
        "max-connections": n + 8,
        "max-queue-bytes": "256MiB" if not SANITIZED else "64MiB",
        "stall-timeout": "600s",
    }
    wrapper = ()
    if not SANITIZED:  # whose instrumentation takes several times as much
        try:
            group = MemoryGroup(limit)
            wrapper = group.wrapper()
        except OSError as error:
            print("     by a limit of the process's data: %s" % error)
            wrapper = ["prlimit", "--data=%d" % limit]
    try:
        server = env.start(nofile=8192, wrapper=wrapper, **flags)
        counts = storm(server, "answers", n)
        truth(counts["refused"] > 0, "nobody was refused: the test is too tame (%r)" % counts)
        truth(counts["served"] >= n - counts["refused"] + min(counts["refused"], 100), "served later: %r" % counts)
        if group:
            print("     peak %s" % group.peak())
        server.expect_empty(5 * SLOW)
        server.expect_working()
        server.stop()
    finally:
        env.sweep()  # also after a failure: a group with a process in it cannot be removed
        if group:
            group.remove()


@test(hooked=True, settle=False)
def each_failing_allocation_is_an_answer(server, rng):
    """OPS-03: the k-th allocation fails, k = 1..200, whatever it is for: the request is refused, the server goes on."""
    server.expect_error("memory|MEMORY|cannot")
    rows, q = random_rows(rng, 70), random_q(rng, 20, 2)
    indices = random_indices(rng, 20, 8, 70)
    hooks, n, n_failed, n_refused = server.hooks, full(200, 60), 0, 0

    def visit():
        client = server.client()
        try:
            s = Session(client)
            region = s.region(1 << 16)
            a = s.create()
            s.append(a, rows)
            b = s.fork(a).id
            s.append(b, rows[:3])
            s.truncate(b, 65)
            s.attend(a, q, indices, want_lse=True)
            s.attend([(a, 20)], region.put(q[:, :1].copy()), indices)
            s.export(b)
            s.import_rows(b, np.zeros((2, 656), np.uint8))
            s.get(a)
            server.control.health()
            region.unregister()
            s.release(a)
            s.close()
        finally:
            client.close()

    for k in range(1, n + 1):
        hooks.n_allocs, hooks.alloc_fail = 0, k
        try:
            while hooks.n_allocs < k and server.process.poll() is None:
                visit()
        except (grpc.RpcError, Refused, Failure, OSError) as error:
            n_refused += 1
            if isinstance(error, grpc.RpcError):
                known = ("RESOURCE_EXHAUSTED", "UNAVAILABLE", "CANCELLED", "UNAUTHENTICATED", "NOT_FOUND")
                truth(error.code().name in known, "allocation %d: %s" % (k, error))
        n_failed += hooks.n_allocs >= k
        hooks.alloc_fail = 0
        truth(server.process.poll() is None, "allocation %d ended the server" % k)
        if k % 10 == 0:
            server.expect_empty(3 * SLOW)
            server.expect_working()
    equal(n_failed, n, "allocations that failed")
    truth(n_refused > n // 10, "only %d of %d were noticed" % (n_refused, n))
    server.expect_empty(3 * SLOW)
    server.expect_working()


if __name__ == "__main__":
    main()
