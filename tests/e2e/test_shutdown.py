#!/usr/bin/python3
"""test_shutdown.py - every way to start and to end, also as process 1 of a container."""

from busy import *  # noqa: F403
import victim

def watch_health(client):
    method = client.channel.unary_stream(
        "/grpc.health.v1.Health/Watch",
        request_serializer=serialize,
        response_deserializer=health_pb.HealthCheckResponse.FromString,
    )
    watched = method(health_pb.HealthCheckRequest(service=""), timeout=120 * SLOW)
    equal(next(watched).status, health_pb.HealthCheckResponse.SERVING, "health")
    return watched


# ---- start and end ----


@test(own=True)
def sigterm_when_idle(env, rng):
    for number in (signal.SIGTERM, signal.SIGINT):
        server = env.start()
        server.control.close()
        begin = time.monotonic()
        server.signal(number)
        equal(server.wait_exit(5 * SLOW), 0, "exit code")
        took = time.monotonic() - begin
        truth(took < 1.0 * SLOW, "an idle server took %.2f s to end" % took)
        truth(not os.path.exists(server.path) and not os.path.exists(server.path + ".fd"), "sockets are left")
    server = env.start()
    server.signal(signal.SIGHUP)
    in_log(server, "configuration read again changed=0 kept=0")
    server.expect_working()
    server.stop()


@test(own=True)
def sigterm_with_open_streams(env, rng):
    """Silent streams of every kind and a stalled reader: they end, the process leaves with 0 in time."""
    server = env.start()
    sessions = [server.session() for _ in range(3)]
    for s in sessions:
        victim.do_sequences(s, rng)
        victim.do_regions(s, rng)
        victim.do_tickets(s, rng)
        s.stream.append(s.create(), random_rows(rng, 1))
    watch = server.control.channel.unary_stream(
        "/grpc.health.v1.Health/Watch",
        request_serializer=serialize,
        response_deserializer=health_pb.HealthCheckResponse.FromString,
    )
    watched = watch(health_pb.HealthCheckRequest(service=SERVICE))
    states = [next(watched).status]
    reflection = server.control.bidi(
        "ServerReflectionInfo", "grpc.reflection.v1.ServerReflection", reflection_v1.ServerReflectionResponse
    )
    reflection.send(reflection_v1.ServerReflectionRequest(list_services=""))
    reflection.recv()
    big = sessions[0].create()
    for _ in range(3):
        sessions[0].append(big, np.tile(random_rows(rng, 500), (7, 1)))
    stalled = [
        server.client().export(
            pb.ExportRowsRequest(session=sessions[0].token, sequence_id=big, dtype=pb.DTYPE_BF16)
        )
        for _ in range(3)
    ]
    raw = raw_connections(server.path, 3)
    begin = time.monotonic()
    server.signal()
    try:
        for message in watched:
            states.append(message.status)
    except grpc.RpcError:
        pass
    for s in sessions:
        event = s.lease.recv()
        if event is not None:
            equal(event.closing.status.reason, "DRAINING", "the lease's last message")
    code = server.wait_exit(5 * SLOW)
    took = time.monotonic() - begin
    equal(code, 0, "exit code")
    truth(took < 2.0 * SLOW, "took %.2f s to end" % took)
    equal(
        states,
        [health_pb.HealthCheckResponse.SERVING, health_pb.HealthCheckResponse.NOT_SERVING],
        "health, watched",
    )
    del stalled, raw


@test(own=True)
def sigterm_lets_running_work_finish(env, rng):
    server = env.start()
    blocker = Blocker(server, rng, 1.0)
    running = blocker.start_and_see()
    behind = blocker.session.attend(blocker.sequence, blocker.q_pool[:1], blocker.i_pool[:1], wait=False)
    blocker.session.stream.wait_until_read()
    watch = server.control.channel.unary_stream(
        "/grpc.health.v1.Health/Watch",
        request_serializer=serialize,
        response_deserializer=health_pb.HealthCheckResponse.FromString,
    )
    watched = watch(health_pb.HealthCheckRequest(service=""))
    equal(next(watched).status, health_pb.HealthCheckResponse.SERVING, "before")
    server.signal()
    equal(next(watched).status, health_pb.HealthCheckResponse.NOT_SERVING, "readiness goes first")
    still_running = blocker.session.stream.pieces.get(running) is None
    if still_running:
        refused = blocker.session.attend(blocker.sequence, blocker.q_pool[:1], blocker.i_pool[:1], wait=False)
        expect_refusal(
            lambda: blocker.session.stream.wait(refused), "DRAINING", code=grpc.StatusCode.UNAVAILABLE
        )
        expect_refusal(lambda: Session(server.control), "DRAINING", code=grpc.StatusCode.UNAVAILABLE)
        expect_refusal(blocker.session.create, "DRAINING", code=grpc.StatusCode.UNAVAILABLE)
    blocker.session.stream.wait(running)
    blocker.check()
    result = blocker.session.stream.wait(behind)
    check_attend(
        result,
        attend_reference(MAIN, blocker.q_pool[:1], blocker.kv, blocker.i_pool[:1], 0.05)[0],
        None,
        "behind",
    )
    equal(server.wait_exit(5 * SLOW), 0, "exit code")


@test(own=True)
def second_sigterm_cuts_it_short(env, rng):
    server = env.start(**{"drain-grace": "600s"})
    blocker = Blocker(server, rng, 20.0 if not SANITIZED else 60.0)
    blocker.start_and_see()
    server.signal()
    in_log(server, "draining")
    truth(server.process.poll() is None, "the server waits for its work")
    begin = time.monotonic()
    server.signal()
    equal(server.wait_exit(8 * SLOW), 0, "exit code after a second signal")
    took = time.monotonic() - begin
    truth(took < 4.0 * SLOW, "took %.2f s after the second signal" % took)


@test(own=True)
def drain_grace_is_kept(env, rng):
    server = env.start(**{"drain-grace": "300ms"})
    blocker = Blocker(server, rng, 20.0 if not SANITIZED else 60.0)
    running = blocker.start_and_see()
    begin = time.monotonic()
    server.signal()
    equal(server.wait_exit(8 * SLOW), 0, "exit code")
    took = time.monotonic() - begin
    truth(took < 2.5 * SLOW, "took %.2f s with a grace of 0.3 s" % took)
    try:
        blocker.session.stream.wait(running)
    except (Refused, grpc.RpcError, Failure):
        pass


@test(own=True)
def drain_call_ends_the_process(env, rng):
    server = env.start()
    s = server.session()
    server.control.call("Drain", grace_us=1000000)
    equal(server.wait_exit(5 * SLOW), 0, "exit code after Drain")
    s.abandon()


@test(own=True)
def sigterm_under_load(env, rng):
    """Many clients at work: each answer is right or says DRAINING, none is lost, exit code 0."""
    server = env.start()
    problems, done = [], threading.Event()

    def work(seed):
        mine = np.random.default_rng(seed)
        n_good = 0
        try:
            s = Session(server.client())
            sequence = s.create()
            s.append(sequence, random_rows(mine, 100))
            q, indices = random_q(mine, 1, 4), random_indices(mine, 1, 40, 100)
            expected = s.attend(sequence, q, indices).out_bits
            while not done.is_set():
                asked = [s.attend(sequence, q, indices, wait=False) for _ in range(8)]
                for request in asked:
                    same_bits(s.stream.wait(request).out_bits, expected, "under load")
                    n_good += 1
                s.append(sequence, random_rows(mine, 1))
        except Refused as refused:
            if refused.status.reason != "DRAINING":
                problems.append(refused)
        except grpc.RpcError as error:
            if error.code() not in (
                grpc.StatusCode.UNAVAILABLE,
                grpc.StatusCode.CANCELLED,
            ):
                problems.append(error)
        except Failure as failed:
            if "the stream ended" not in str(failed) and "instead of `opened`" not in str(failed):
                problems.append(failed)
        counts.append(n_good)

    counts = []
    threads = [
        threading.Thread(target=work, args=(int(rng.integers(1 << 30)),), daemon=True) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: server.control.stats().n_requests > 300 // SLOW, 20 * SLOW, "load is on")
    begin = time.monotonic()
    server.signal()
    equal(server.wait_exit(8 * SLOW), 0, "exit code")
    took = time.monotonic() - begin
    done.set()
    for thread in threads:
        thread.join(30)
    truth(not problems, "%r" % problems[:3])
    truth(sum(counts) > 0 and len(counts) == 6, "work done %r" % counts)
    truth(took < 3.0 * SLOW, "took %.2f s under load" % took)


@test(own=True)
def sigterm_cancels_no_accepted_call(env, rng):
    """Unary calls that were taken before SIGTERM are all done; those that come later are told to go elsewhere."""
    n_queue, n_calls = 16, 60
    server = env.start(hooked=True, **{"inline-flops": 0, "max-queue": n_queue})
    s = server.session()
    sequences = [s.create() for _ in range(n_calls)]
    method = s.client.channel.unary_unary(
        "/%s/Append" % SERVICE, request_serializer=serialize, response_deserializer=pb.AppendReply.FromString
    )
    watched = watch_health(server.control)
    server.hooks.gate = 1
    rows = inline(random_rows(rng, 3))
    calls = [
        method.future(
            pb.AppendRequest(session=s.token, append=pb.AppendOp(sequence_id=which, rows=rows)),
            timeout=60 * SLOW,
        )
        for which in sequences
    ]
    # exactly so many find room in the queue; once all others are refused, these are known to be in it
    wait_until(lambda: sum(c.done() for c in calls) == n_calls - n_queue, 20 * SLOW, "the queue is full")
    accepted = [c for c in calls if not c.done()]
    server.signal()
    equal(next(watched).status, health_pb.HealthCheckResponse.NOT_SERVING, "readiness goes first")
    for late in (s.create, lambda: s.append(sequences[0], rows)):
        expect_refusal(late, "DRAINING", code=grpc.StatusCode.UNAVAILABLE)
    server.hooks.gate = 0
    for call in accepted:
        equal(call.result().n_tokens, 3, "tokens after a call that was accepted")
    for call in calls:
        if call not in accepted:
            equal(refused_from(call.exception()).status.reason, "QUEUE_FULL", "a call that found no room")
    equal(server.wait_exit(5 * SLOW), 0, "exit code")


# ---- as process 1 of a container (NET-02): signals have no default action there ----


class Container:
    """A server that is process 1 of a PID namespace with a /proc of its own."""

    def __init__(self, env, ready=True, **options):
        probe = subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True)
        if probe.returncode != 0:
            raise Skip("no right to make a PID namespace: %s" % probe.stderr.decode().strip())
        wrapper = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
        self.server = Server(env, wrapper=wrapper, **options)
        if ready:
            self.server.wait_ready()
        self.pid = wait_until(self._child, 20 * SLOW, "process 1 exists")

    def _child(self):
        parent = self.server.process.pid
        with open("/proc/%d/task/%d/children" % (parent, parent)) as f:
            child = f.read().split()
        return int(child[0]) if child else 0

    def signal(self):
        os.kill(self.pid, signal.SIGTERM)

    def expect_end(self, limit):
        """Exit code 0 within `limit` seconds of now, and nothing left."""
        begin = time.monotonic()
        equal(self.server.wait_exit(5 * SLOW), 0, "exit code as process 1")
        took = time.monotonic() - begin
        truth(took < limit * SLOW, "took %.2f s as process 1" % took)
        for path in (self.server.path, self.server.path + ".fd"):
            truth(not os.path.exists(path), "%s is still there" % path)


@test(own=True)
def process_1_ends_when_idle(env, rng):
    """NET-02 (a)"""
    box = Container(env)
    box.server.expect_working()
    box.signal()
    box.expect_end(1.0)


@test(own=True)
def process_1_lets_a_unary_call_finish(env, rng):
    """NET-02 (b): health goes first, what is new is UNAVAILABLE, what runs is done."""
    box = Container(env, hooked=True, **{"inline-flops": 0})
    server = box.server
    s = server.session()
    sequence = s.create()
    watched = watch_health(server.control)
    server.hooks.gate = 1
    request = pb.AppendRequest(
        session=s.token, append=pb.AppendOp(sequence_id=sequence, rows=inline(random_rows(rng, 5)))
    )
    method = s.client.channel.unary_unary(
        "/%s/Append" % SERVICE, request_serializer=serialize, response_deserializer=pb.AppendReply.FromString
    )
    running = method.future(request, timeout=60 * SLOW)
    wait_until(lambda: server.hooks.n_entered > 0, 20 * SLOW, "the call runs")
    box.signal()
    equal(next(watched).status, health_pb.HealthCheckResponse.NOT_SERVING, "readiness goes first")
    expect_refusal(s.create, "DRAINING", code=grpc.StatusCode.UNAVAILABLE)
    truth(server.process.poll() is None, "the server waits for its call")
    server.hooks.gate = 0
    equal(running.result().n_tokens, 5, "tokens after the call that ran")
    box.expect_end(2.0)


@test(own=True)
def process_1_ends_with_silent_streams(env, rng):
    """NET-02 (c)"""
    box = Container(env)
    s = box.server.session()
    s.stream.append(s.create(), random_rows(rng, 1))
    box.signal()
    box.expect_end(2.0)


@test(own=True)
def process_1_ends_with_a_watcher(env, rng):
    """NET-02 (d)"""
    box = Container(env)
    watched = watch_health(box.server.control)
    box.signal()
    equal(next(watched).status, health_pb.HealthCheckResponse.NOT_SERVING, "what the watcher is told")
    box.expect_end(2.0)


@test(own=True)
def process_1_ends_with_a_stalled_reader(env, rng):
    """NET-02 (e)"""
    box = Container(env, **{"pool-pages": 1024})
    s = box.server.session()
    sequence = s.create()
    rows = random_rows(rng, 500)
    for _ in range(20):
        s.append(sequence, rows)
    call = box.server.client().export(
        pb.ExportRowsRequest(session=s.token, sequence_id=sequence, dtype=pb.DTYPE_BF16), timeout=None
    )
    truth(next(call).n_tokens > 0, "the export has begun")
    box.signal()
    box.expect_end(3.0)


@test(own=True)
def process_1_ends_during_start(env, rng):
    """NET-02 (f): the signal comes while the device opens; it is neither lost nor does it leave a socket behind."""
    for _ in range(3):
        box = Container(env, ready=False, hooked={"open_gate": 1})
        hooks = box.server.hooks
        wait_until(lambda: hooks.n_opening > 0, 20 * SLOW, "the device opens")
        box.signal()
        hooks.open_gate = 0
        box.expect_end(3.0)


@test(own=True)
def process_1_ends_at_the_second_signal(env, rng):
    box = Container(env, **{"drain-grace": "600s"})
    blocker = Blocker(box.server, rng, 20.0 if not SANITIZED else 60.0)
    blocker.start_and_see()
    box.signal()
    in_log(box.server, "draining")
    truth(box.server.process.poll() is None, "the server waits for its work")
    box.signal()
    box.expect_end(4.0)


@test(own=True)
def second_server_on_the_same_socket(env, rng):
    first = env.start()
    second = Server(env, folder=first.folder)
    code = second.wait_exit(5 * SLOW)
    truth(code != 0, "a second server started on the same socket")
    truth(first.path in second.text() and "another server" in second.text(), "it says %r" % second.text())
    first.expect_working()
    other = Server(env, **{"fd-socket": first.path + ".fd"})
    truth(other.wait_exit(5 * SLOW) != 0, "a second server took the fd socket of the first")
    truth(first.path + ".fd" in other.text(), "it says %r" % other.text())
    with first.session() as s:
        s.region(4096)
    first.stop()
    third = Server(env, folder=first.folder).wait_ready()
    third.expect_working()
    third.stop()


@test(own=True)
def stale_socket_is_replaced(env, rng):
    first = env.start()
    first.process.kill()
    first.process.wait()
    truth(os.path.exists(first.path), "a killed server leaves its socket")
    second = Server(env, folder=first.folder).wait_ready()
    second.expect_working()
    with second.session() as s:
        s.region(4096)
    second.stop()


@test(own=True)
def other_files_are_left_alone(env, rng):
    for which in ("", ".fd"):
        folder = tempfile.mkdtemp(prefix="dsa-e2e-")
        path = os.path.join(folder, "d.sock")
        with open(path + which, "w") as f:
            f.write("precious")
        server = Server(env, folder=folder)
        code = server.wait_exit(5 * SLOW)
        truth(code != 0, "started over a regular file")
        truth(path + which in server.text(), "it says %r" % server.text())
        with open(path + which) as f:
            equal(f.read(), "precious", "the file")
    missing = Server(env, listen="unix:/nonexistent/folder/d.sock")
    truth(missing.wait_exit(5 * SLOW) != 0 and "/nonexistent" in missing.text(), "says %r" % missing.text())
    long = Server(env, listen="unix:/tmp/" + "x" * 120)
    truth(long.wait_exit(5 * SLOW) != 0, "a path of 120 bytes")


@test(own=True)
def socket_modes(env, rng):
    server = env.start(**{"socket-mode": "0600"})
    for path in (server.path, server.path + ".fd"):
        equal(os.stat(path).st_mode & 0o777, 0o600, "mode of " + path)
    server.stop()


if __name__ == "__main__":
    main()
