#!/usr/bin/python3
"""test_overload.py - more than the server can take: slow readers, full queues, probes, connections, descriptors, memory."""

from busy import *  # noqa: F403
import http2
import victim

# ---- slow readers ----


def free_memory():
    with open("/proc/meminfo") as f:
        return int(re.search(r"MemAvailable:\s*(\d+) kB", f.read()).group(1)) << 10


@test(own=True)
def slow_readers_do_not_grow_the_server(env, rng):
    """NET-01: clients that ask for 4 GiB each and read nothing; a normal client goes on; then some of them read."""
    n_clients = full(50, 8)
    # 4 GiB of bf16 rows are 2.3 GiB in the pool: less where that is not to be had
    tokens = (3728384 if free_memory() > 12 << 30 else 1 << 18) if not SANITIZED else 8192
    print("     each asks for %d MiB" % (tokens * 1152 >> 20))
    step = min(tokens, 1 << 16)
    server = env.start(
        **{
            "pool-pages": tokens // 64 + 64,
            "max-sequence-tokens": 1 << 22,
            "max-stream-bytes": "4MiB",
            "stall-timeout": "600s",
        }
    )
    with server.session(name="owner") as s:
        sequence = s.create()
        stored = quantize(MAIN, random_rows(rng, 512))[0]
        region = s.region(step * 656)
        tensor = region.put(np.tile(stored, (step // 512, 1)))
        while s.get(sequence).n_tokens < tokens:
            left = tokens - s.get(sequence).n_tokens
            tensor.shape[0] = min(left, step)
            s.import_rows(sequence, tensor)
        region.unregister()
        expected = dequantize(MAIN, stored)
        q, indices = random_q(rng, 4, 128), random_indices(rng, 4, 32, 400)
        want = s.attend(sequence, q, indices).out_bits
        before, fds = server.rss(), server.n_fds()
        clients = [server.client() for _ in range(n_clients)]
        request = pb.ExportRowsRequest(session=s.token, sequence_id=sequence, dtype=pb.DTYPE_BF16)
        exports = [c.export(request, timeout=None) for c in clients]
        deaf = AttendStream(s, reads=False)
        asked = [
            deaf.attend(sequence, q, indices, wait=False) for _ in range(scaled(400, 40))
        ]  # 512 KiB each, unread
        for _ in range(scaled(2000, 20)):
            same_bits(
                s.attend(sequence, q[:1], indices[:1]).out_bits, want[:1], "a normal client among slow ones"
            )
        grown, bound = server.rss() - before, n_clients * (2 << 20) + (16 << 20)
        print("     grown by %d MiB, bound %d MiB" % (grown >> 20, bound >> 20))
        if not SANITIZED:
            truth(
                grown < bound,
                "the server grew by %d MiB for %d slow readers, bound %d MiB"
                % (grown >> 20, n_clients + 1, bound >> 20),
            )
        least = min(tokens, 40000)
        for number, export in enumerate(exports[:2]):
            at = 0
            for chunk in export:
                equal(chunk.first, at, "chunk after a pause")
                got = np.frombuffer(chunk.rows, np.uint16).reshape(-1, 576)
                same_bits(got, expected[(at + np.arange(len(got))) % 512], "rows after a pause")
                at += chunk.n_tokens
                if at >= least:
                    break
            truth(at >= least, "tokens of export %d: %d" % (number, at))
        for export in exports:
            export.cancel()
        deaf.bidi.start_reading()
        for request_id in asked:
            same_bits(deaf.wait(request_id).out_bits, want, "a reply read late")
        deaf.close()
        for client in clients:
            client.close()
        wait_until(lambda: server.n_fds() <= fds, 5 * SLOW, "the clients' descriptors are closed")
        if not SANITIZED:
            wait_until(
                lambda: server.rss() - before < 64 << 20,
                10,
                "memory comes back (%d MiB more)" % ((server.rss() - before) >> 20),
            )
    server.expect_empty()
    server.stop()


@test(**{"pool-bytes": "32MiB", "pool-pages": 0, "stall-timeout": "500ms"})
def stalled_streams_are_ended(server, rng):
    with server.session() as s:
        sequence = s.create()
        rows = np.tile(random_rows(rng, 400), (25, 1))
        region = s.region(rows.nbytes)
        tensor = region.put(rows)
        for _ in range(2):
            s.append(sequence, tensor)
        request = pb.ExportRowsRequest(session=s.token, sequence_id=sequence, dtype=pb.DTYPE_BF16)
        client = server.client()
        export = client.export(request)
        deaf = AttendStream(s, reads=False)
        q, indices = random_q(rng, 4, 128), random_indices(rng, 4, 8, 400)
        for _ in range(200):
            deaf.attend(sequence, q, indices, wait=False)
        # what the server has given up on is told when the client reads again
        in_log(server, "method=/dsa.v1.SparseAttention/ExportRows queued_bytes", 20 * SLOW)
        in_log(server, "method=/dsa.v1.SparseAttention/Attend queued_bytes", 20 * SLOW)
        for name, read in (
            ("export", lambda: [c.n_tokens for c in export]),
            ("attend", lambda: list(deaf.bidi.call)),
        ):
            try:
                read()
                fail("%s: all came although nobody read for longer than the timeout" % name)
            except grpc.RpcError as error:
                equal(error.code(), grpc.StatusCode.RESOURCE_EXHAUSTED, "%s: code" % name)
                refused = refused_from(error)
                truth(
                    "STALLED" in (error.details() or "") or (refused and refused.status.reason == "STALLED"),
                    "%s: says %r" % (name, error.details()),
                )
        client.close()
        same_bits(s.export(sequence)[:400], quantize(MAIN, rows[:400])[0], "the session goes on")


# ---- overload ----


@test(**{"max-queue": 8, "max-inflight": 64})
def full_queue_is_refused_with_a_hint(server, rng):
    """OPS-03: bounded queue, RESOURCE_EXHAUSTED with a retry hint, health stays up, and afterwards all is normal."""
    blocker = Blocker(server, rng, 0.5)
    running = blocker.start()
    with server.session() as s:
        sequence = s.create()
        s.append(sequence, random_rows(rng, 64))
        q, indices = random_q(rng, 1, 2), random_indices(rng, 1, 8, 64)
        expected = s.attend(sequence, q, indices).out_bits
        blocker.session.stream.wait(running)
        running = blocker.start()
        blocker.session.stream.wait_until_read()  # it has its place before the others fill the queue
        streams = [AttendStream(s) for _ in range(4)]
        asked = [(st, st.attend(sequence, q, indices, wait=False)) for _ in range(50) for st in streams]
        checks = []
        for _ in range(20):
            begin = time.monotonic()
            equal(
                server.control.health().status, health_pb.HealthCheckResponse.SERVING, "health under overload"
            )
            checks.append(time.monotonic() - begin)
        truth(max(checks) < 0.5 * SLOW, "a health check took %.3f s" % max(checks))
        outcomes = {"ok": 0, "QUEUE_FULL": 0}
        for stream, request in asked:
            try:
                same_bits(stream.wait(request).out_bits, expected, "a reply under overload")
                outcomes["ok"] += 1
            except Refused as refused:
                equal(refused.status.reason, "QUEUE_FULL", "a refusal under overload")
                equal(refused.status.code, grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], "code")
                truth(refused.status.retry_after_us > 0, "a retry hint")
                outcomes["QUEUE_FULL"] += 1
        truth(outcomes["ok"] > 0 and outcomes["QUEUE_FULL"] > 0, "outcomes %r" % outcomes)
        blocker.session.stream.wait(running)
        for stream in streams:
            same_bits(stream.attend(sequence, q, indices).out_bits, expected, "after the storm")
            stream.close()
    blocker.session.close()


@test(**{"max-inflight": 4})
def inflight_beyond_the_limit_waits(server, rng):
    """A client that sends more than max-inflight is read more slowly; nothing is lost."""
    with server.session() as s:
        sequence = s.create()
        s.append(sequence, random_rows(rng, 64))
        q, indices = random_q(rng, 1, 2), random_indices(rng, 1, 8, 64)
        expected = s.attend(sequence, q, indices).out_bits
        asked = [s.attend(sequence, q, indices, wait=False) for _ in range(scaled(200, 40))]
        for request in asked:
            same_bits(s.stream.wait(request).out_bits, expected, "one of many")


@test(settle=False, **{"max-connections": 8})
def connection_cap(server, rng):
    held = raw_connections(server.path, 40)
    in_log(server, "max-connections reached")
    for connection in held:
        connection.close()

    def served():  # a client may still come too early and be refused
        try:
            return len(server.client().stats().pools) == 1
        except grpc.RpcError as error:
            equal(error.code(), grpc.StatusCode.UNAVAILABLE, "refused at the cap")
            return False

    wait_until(served, 5 * SLOW, "connections are taken again")
    server.expect_working()
    server.expect_empty()
    fds = raw_connections(server.path + ".fd", 40, socket.SOCK_SEQPACKET)
    for connection in fds:
        connection.close()

    def offered():
        try:
            with server.session() as s:
                s.region(4096)
            return True
        except (OSError, Failure):
            return False

    wait_until(offered, 5 * SLOW, "descriptors are taken again")
    server.expect_empty()


@test(own=True)
def out_of_descriptors(env, rng):
    """CVE-2023-4785's kind: `ulimit -n` reached by connections; the server serves again once they are closed."""
    server = env.start(nofile=64)
    server.expect_error("cannot accept|Too many open files|EMFILE")
    with server.session() as s:
        sequence = s.create()
        s.append(sequence, random_rows(rng, 70))
        fds = s.fd_socket()
        before = server.n_fds()
        held = raw_connections(server.path, 120)
        wait_until(
            lambda: server.n_fds() >= 63, 5 * SLOW, "the descriptors are used up (%d)" % server.n_fds()
        )
        equal(s.get(sequence).n_tokens, 70, "open connections are served meanwhile")
        memfd = victim.memfd()
        number, status, text = fds.offer(s.token, 77, [memfd])
        truth(status < 0 and text, "an offer without a descriptor left: %d %r" % (status, text))
        for connection in held:
            connection.close()
        wait_until(lambda: server.n_fds() <= before + 2, 5 * SLOW, "the descriptors come back")
        equal(fds.offer(s.token, 78, [memfd])[1], 0, "offers work again")
        os.close(memfd)
    server.expect_working()
    server.expect_empty()
    server.stop()


# ---- probes ----

HEALTHY = b"\0\0\0\0\2\x08\1"  # a gRPC message: HealthCheckResponse, SERVING


def probe(server):
    """Connect, Check(""), close: a client of its own, down to the frames."""
    connection = http2.connect(server.path)
    connection.sendall(http2.call("/grpc.health.v1.Health/Check", b"\0\0\0\0\0"))
    answer = http2.read_until(connection, lambda data: HEALTHY in data)
    connection.close()
    truth(HEALTHY in answer, "a probe was answered %r" % answer)


@test(hooked=True, settle=False, **{"max-queue": 8, "inline-flops": 0, "pool-pages": 1024})
def probes_under_overload(server, rng):
    """OPS-01: the device hangs, the queue is full, 200 streams stall: 10,000 probes get SERVING and leave nothing."""
    serving = health_pb.HealthCheckResponse.SERVING
    with server.session() as s:
        sequence = s.create()
        rows = random_rows(rng, 500)
        for _ in range(scaled(100, 10)):  # 55 MiB as bf16
            s.append(sequence, rows)
        q, indices = random_q(rng, 1, 2), random_indices(rng, 1, 8, 500)
        expected = s.attend(sequence, q, indices).out_bits
        watch = server.control.channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            request_serializer=serialize,
            response_deserializer=health_pb.HealthCheckResponse.FromString,
        )
        states = []
        watched = watch(health_pb.HealthCheckRequest(service=SERVICE))

        def note():
            try:
                for message in watched:
                    states.append(message.status)
            except grpc.RpcError:
                pass

        watcher = threading.Thread(target=note)
        watcher.start()
        readers = [server.client() for _ in range(4)]
        request = pb.ExportRowsRequest(session=s.token, sequence_id=sequence, dtype=pb.DTYPE_BF16)
        stalled = []
        for reader in readers:
            for _ in range(full(50, 10)):
                while True:  # one chunk is at the worker at a time, and the queue is short
                    call = reader.export(request, timeout=None)
                    try:
                        next(call)
                        break
                    except grpc.RpcError as error:
                        equal(refused_from(error).status.reason, "QUEUE_FULL", "an export")
                stalled.append(call)
        entered = server.hooks.n_entered
        server.hooks.gate = 1
        streams = [AttendStream(s) for _ in range(4)]
        asked = [(st, st.attend(sequence, q, indices, wait=False)) for _ in range(15) for st in streams]
        wait_until(lambda: server.hooks.n_entered > entered, 20 * SLOW, "a launch hangs")
        try:
            for name in ("", SERVICE, "grpc.health.v1.Health") * 20:
                equal(server.control.health(name).status, serving, "health of %r under overload" % name)
            try:
                server.control.health("no.such.Service")
                fail("an unknown name was answered")
            except grpc.RpcError as error:
                equal(error.code(), grpc.StatusCode.NOT_FOUND, "health of an unknown name")
            n, before = full(10000, 1000), None
            for i in range(n):
                probe(server)
                if i == 20:
                    before = server.n_fds()
            wait_until(lambda: server.n_fds() <= before + 3, 5 * SLOW, "the probes' descriptors are closed")
            for _ in range(50):  # the queue hovers at its limit
                server.hooks.gate = 0
                left = server.hooks.n_left
                asked += [(st, st.attend(sequence, q, indices, wait=False)) for st in streams]
                wait_until(lambda: server.hooks.n_left > left, 20 * SLOW, "a launch ends")
                server.hooks.gate = 1
                equal(server.control.health().status, serving, "health at the limit")
        finally:
            server.hooks.gate = 0
        outcomes = {"ok": 0, "QUEUE_FULL": 0}
        for stream, request_id in asked:
            try:
                same_bits(stream.wait(request_id).out_bits, expected, "a reply under overload")
                outcomes["ok"] += 1
            except Refused as refused:
                equal(refused.status.reason, "QUEUE_FULL", "a refusal under overload")
                truth(refused.status.retry_after_us > 0, "a retry hint")
                outcomes["QUEUE_FULL"] += 1
        truth(outcomes["ok"] > 0 and outcomes["QUEUE_FULL"] > 0, "outcomes %r" % outcomes)
        for call in stalled:
            call.cancel()
        for reader in readers:
            reader.close()
        for stream in streams:
            stream.close()
        watched.cancel()
        watcher.join(10)
        equal(states, [serving], "states that a watcher saw: overload changes nothing")
    server.expect_empty(3 * SLOW)
    server.expect_working()


@test(own=True)
def a_lost_device_is_told(env, rng):
    """OPS-02: a launch fails as by a bad address: its call and all later ones are refused, health is red."""
    server = env.start(hooked=True, **{"inline-flops": 0})
    server.expect_error("device")
    with server.session() as s:
        sequence = s.create()
        s.append(sequence, random_rows(rng, 64))
        q, indices = random_q(rng, 1, 2), random_indices(rng, 1, 8, 64)
        s.attend(sequence, q, indices)
        equal(server.control.health().status, health_pb.HealthCheckResponse.SERVING, "before")
        entered = server.hooks.n_entered
        server.hooks.gate = 1
        asked = [s.attend(sequence, q, indices, wait=False) for _ in range(20)]
        wait_until(lambda: server.hooks.n_entered > entered, 20 * SLOW, "a launch begins")
        server.hooks.launch_fail = -7  # DSK_E_DEVICE
        server.hooks.gate = 0
        for request in asked:
            expect_refusal(lambda: s.stream.wait(request), "DEVICE_LOST")
        server.hooks.launch_fail = 0
        expect_refusal(lambda: s.attend(sequence, q, indices), "DEVICE_LOST")
        expect_refusal(lambda: s.append(sequence, random_rows(rng, 1)), "DEVICE_LOST")
        wait_until(
            lambda: server.control.health().status == health_pb.HealthCheckResponse.NOT_SERVING,
            1 * SLOW,
            "health is red",
        )
    server.signal()
    equal(server.wait_exit(5 * SLOW), 0, "exit code")


if __name__ == "__main__":
    main()
