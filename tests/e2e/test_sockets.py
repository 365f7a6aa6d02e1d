#!/usr/bin/python3
"""test_sockets.py - message sizes, connections and streams that no client library would make: refused, nothing lost."""

from raw import *  # noqa: F403
import http2

# ---- message sizes (NET-04) ----


@test()
def message_sizes(server, rng):
    """Exactly the limit passes, one byte more is refused with both numbers, and the connection stays good."""
    client = server.client()
    limit = server.capabilities.limits.max_message_bytes

    def padded(n):
        head = len(varint(1002 << 3 | 2))
        data = field(1002, bytes(n - head - 4))
        data = field(1002, bytes(n - head - 4 + n - len(data)))
        equal(len(data), n, "the test's own arithmetic")
        return data

    for n in (4 << 20, (4 << 20) - 1, (4 << 20) + 1, limit - 1, limit):
        truth(len(client.call("GetStats", padded(n)).pools) == 1, "a message of %d bytes" % n)
    for n in (limit + 1, limit * 2):
        expect_refusal(
            lambda: client.call("GetStats", padded(n)),
            "TOO_LARGE",
            "message",
            n,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        )
    for n in (64 << 20, 100 << 20):  # so far above that gRPC itself refuses
        try:
            client.call("GetStats", padded(n))
            fail("a message of %d bytes was taken" % n)
        except grpc.RpcError as error:
            equal(error.code(), grpc.StatusCode.RESOURCE_EXHAUSTED, "code for %d bytes" % n)
            truth(str(n) in error.details(), "details %r" % error.details())
        truth(len(client.call("GetStats").pools) == 1, "the connection is still usable")
    client.close()


@test()
def many_large_messages_at_once(server, rng):
    """64 calls of the largest size at the same time: all are served, within what they weigh."""
    n = 64 if not SANITIZED else 8
    limit = server.capabilities.limits.max_message_bytes
    client = server.client()
    method = client.channel.unary_unary(
        "/%s/GetStats" % SERVICE, request_serializer=bytes, response_deserializer=pb.Stats.FromString
    )
    before = server.rss()
    data = field(1002, bytes(limit - 16))
    calls = [method.future(data, timeout=60 * SLOW) for _ in range(n)]
    highest = 0
    for call in calls:
        truth(len(call.result().pools) == 1, "a reply")
        highest = max(highest, server.rss())
    if not SANITIZED:
        truth(
            highest - before < 1.5 * n * limit,
            "the server grew by %d MiB for %d MiB of messages" % ((highest - before) >> 20, n * limit >> 20),
        )
    client.close()


@test()
def compressed_messages(server, rng):
    """gzip is understood; what unpacks to more than the limit is refused, without the memory being taken."""
    client = server.client()
    method = client.channel.unary_unary(
        "/%s/GetStats" % SERVICE, request_serializer=bytes, response_deserializer=pb.Stats.FromString
    )
    truth(
        len(method(field(1002, bytes(1 << 20)), timeout=20 * SLOW, compression=grpc.Compression.Gzip).pools)
        == 1,
        "gzip",
    )
    before = server.rss()
    for _ in range(3):
        try:
            method(field(1002, bytes(64 << 20)), timeout=20 * SLOW, compression=grpc.Compression.Gzip)
            fail("64 MiB out of 64 KiB were taken")
        except grpc.RpcError as error:
            truth(
                error.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL),
                "code %s" % error.code(),
            )
    if not SANITIZED:
        truth(
            server.rss() - before < 200 << 20, "the server grew by %d MiB" % ((server.rss() - before) >> 20)
        )
    client.close()


@test()
def declared_sizes_are_not_allocated(server, rng):
    """2 GiB and more announced in the length prefix, nothing behind it."""
    path = "/%s/GetStats" % SERVICE
    settings_ack = http2.frame(4, 1, 0, b"")
    before = server.rss()
    held = []
    for size in (2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, (8 << 20) + 1) * 4:
        connection = http2.connect(server.path)
        connection.sendall(http2.call(path, b"\0" + struct.pack(">I", size) + bytes(100)))
        held.append(connection)
    for connection in held:  # the server has read it all, and either waits for the rest or has refused
        truth(
            settings_ack in http2.read_until(connection, lambda d: settings_ack in d),
            "the connection was not served",
        )
    for size in (8 << 20, 1 << 20):  # allowed, but never sent in full
        connection = http2.connect(server.path)
        connection.sendall(http2.call(path, b"\0" + struct.pack(">I", size) + bytes(100)))
        held.append(connection)
    if not SANITIZED:
        truth(server.rss() - before < 64 << 20, "the server grew by %d MiB" % ((server.rss() - before) >> 20))
    for connection in held:
        connection.close()


@test()
def unary_calls_with_no_or_two_messages(server, rng):
    client = server.client()
    for name in ("GetStats", "GetCapabilities", "CreateSequence"):
        method = client.channel.stream_unary(
            "/%s/%s" % (SERVICE, name),
            request_serializer=bytes,
            response_deserializer=METHODS[name][1].FromString,
        )
        try:
            method(iter([]), timeout=20 * SLOW)
            fail("%s without a message was answered" % name)
        except grpc.RpcError as error:
            truth(
                error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED),
                "%s: %s" % (name, error.code()),
            )
        try:
            method(iter([b"", b""]), timeout=20 * SLOW)
        except grpc.RpcError:
            pass
    stream = client.channel.stream_stream(
        "/%s/ExportRows" % SERVICE, request_serializer=bytes, response_deserializer=pb.RowChunk.FromString
    )
    try:
        list(stream(iter([]), timeout=20 * SLOW))
        fail("ExportRows without a message was answered")
    except grpc.RpcError as error:
        truth(
            error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED),
            "ExportRows: %s" % error.code(),
        )
    attend = client.bidi("Attend")
    attend.half_close()
    equal(attend.recv(), None, "an Attend stream without a message ends cleanly")
    client.close()


# ---- the sockets themselves ----


@test()
def garbage_on_the_grpc_socket(server, rng):
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    headers = http2.call("/%s/GetStats" % SERVICE, b"\0\0\0\0\0")
    samples = [
        b"",
        b"\0",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        preface[:10],
        preface,
        preface + bytes(1000),
        preface + b"\xff" * 1000,
        headers[:60],
        headers[:-3],
        headers + http2.frame(0, 1, 1, b""),
    ]
    samples += [rng.bytes(int(rng.integers(1, 5000))) for _ in range(20)]
    samples += [preface + rng.bytes(int(rng.integers(1, 5000))) for _ in range(20)]
    samples += [
        preface
        + http2.frame(4, 0, 0, b"")
        + http2.frame(
            int(rng.integers(0, 12)),
            int(rng.integers(0, 256)),
            int(rng.integers(0, 5)),
            rng.bytes(int(rng.integers(0, 200))),
        )
        for _ in range(scaled(100, 20))
    ]
    samples += [headers + http2.frame(3, 0, 1, struct.pack(">I", 8))] * 20  # reset at once
    samples += [
        preface + http2.frame(4, 0, 0, b"") + http2.frame(1, 0, 1, b"\0\x03abc\x7f" + b"x" * 127) * 50
    ]
    held = []
    for data in samples:
        connection = http2.connect(server.path)
        try:
            connection.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass
        if rng.random() < 0.5:
            connection.close()
        else:
            held.append(connection)
    truth(len(server.control.stats().pools) == 1, "answers while garbage connections are open")
    for connection in held:
        connection.close()
    server.expect_error("^E\\d")  # gRPC's own lines about such peers


@test()
def rapid_resets(server, rng):
    """Streams opened and reset by the hundred on one connection (rapid reset): others are served meanwhile."""
    connection = http2.connect(server.path)
    first = http2.call("/%s/Attend" % SERVICE, b"")
    connection.sendall(first)
    headers = first[first.index(b"\x01\x04\0\0\0\x01") + 6 :]
    block = headers[: len(headers) - 9]
    connection.setblocking(False)
    sent = 0
    for stream in range(3, 2 * scaled(2000, 300), 2):
        try:
            connection.send(
                http2.frame(1, 4, stream, block) + http2.frame(3, 0, stream, struct.pack(">I", 8))
            )
            sent += 1
        except BlockingIOError:
            break
        except (BrokenPipeError, ConnectionResetError):
            break
        if stream % 201 == 0:
            truth(len(server.control.stats().pools) == 1, "answers under rapid resets")
    truth(sent > 50, "sent %d" % sent)
    connection.close()
    server.expect_error("^E\\d")


@test()
def garbage_on_the_fd_socket(server, rng):
    s = server.session()
    path = s.opened.fd_socket
    fd = memfd(4096)
    before = server.n_fds()
    good = struct.pack(FdSocket.OFFER, FdSocket.MAGIC, 1, s.token, 7)
    for data, n_fds in (
        (b"", 0),
        (b"", 1),
        (b"x", 1),
        (good[:31], 1),
        (good + b"x", 1),
        (good * 100, 1),
        (good, 0),
        (good, 2),
        (good, 50),
        (bytes(32), 1),
        (b"\xff" * 32, 1),
        (bytes(60000), 3),
    ):
        fds = FdSocket(path)
        try:
            fds.send(data, [fd] * n_fds)
            answer = fds.answer()
            truth(
                answer is None or answer[1] < 0,
                "%d bytes with %d descriptors: %r" % (len(data), n_fds, answer),
            )
        except (BrokenPipeError, ConnectionResetError):
            pass
        fds.close()
    for _ in range(scaled(200, 40)):
        fds = FdSocket(path)
        try:
            fds.send(rng.bytes(int(rng.integers(1, 100))), [fd] * int(rng.integers(0, 4)))
        except (BrokenPipeError, ConnectionResetError):
            pass
        fds.close()
    flood = FdSocket(path)  # many offers, no answer read
    flood.socket.setblocking(False)
    for _ in range(2000):
        try:
            flood.send(good[:-8] + struct.pack("=Q", 0), [fd])
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            break
    s.region(4096)  # others are served meanwhile
    flood.close()
    wait_until(lambda: server.n_fds() <= before + 3, 5 * SLOW, "descriptors are closed")
    os.close(fd)
    wrong_kind = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        wrong_kind.connect(path)
        fail("a stream socket could connect to the fd socket")
    except OSError:
        wrong_kind.close()
    s.close()


@test()
def many_connections(server, rng):
    """A hundred clients at once, each with a session; half of them vanish without a word."""
    n = scaled(100, 24)
    n = min(n, server.capabilities.limits.max_sessions)
    failures = []

    def visit(number):
        mine = np.random.default_rng(number)
        try:
            client = server.client()
            s = Session(client)
            sequence = s.create()
            rows = random_rows(mine, 40)
            s.append(sequence, rows)
            s.region(4096)
            same_bits(s.export(sequence), quantize(MAIN, rows)[0], "client %d" % number)
            if number % 2:
                s.close()
            client.close()
        except Exception as error:  # noqa: BLE001
            failures.append((number, error))

    threads = [threading.Thread(target=visit, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    truth(not failures, "%r" % failures[:3])
    server.expect_empty(timeout=3 * SLOW)


# ---- protocol misuse ----


@test()
def session_closed_under_its_requests(server, rng):
    """Everything in flight is answered once, with a result or a reason; the pages come back."""
    for way in ("half_close", "cancel"):
        s, sequence, region = fixture(server, rng)
        q, indices = random_q(rng, 8, 16), random_indices(rng, 8, 512, 64)
        stream = s.stream
        asked = [stream.attend(sequence, q, indices, wait=False) for _ in range(60)]
        appended = [stream.append(sequence, random_rows(rng, 1), wait=False) for _ in range(10)]
        if way == "half_close":
            s.lease.half_close()
        else:
            s.lease.cancel()
        outcomes = {}
        for request_id in asked + appended:
            try:
                stream.wait(request_id)
                outcome = "ok"
            except Refused as refused:
                outcome = refused.status.reason
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
        truth(
            set(outcomes) <= {"ok", "NO_SESSION", "CANCELLED", "SESSION_EXPIRED", "NOT_FOUND"},
            "outcomes %r" % outcomes,
        )
        stream.bidi.cancel()
        server.expect_empty()
        s.fds.close()


@test()
def messages_out_of_place(server, rng):
    s, sequence, region = fixture(server, rng)
    s.lease.send(pb.SessionRequest(open=pb.SessionOpen()))  # a second open
    event = s.lease.recv()
    equal(event.WhichOneof("kind"), "closing", "answer to a second open")
    equal(event.closing.status.reason, "BAD_REQUEST", "why")
    server.expect_empty()
    s.abandon()
    flood = server.session()
    deaf = flood.client.bidi("OpenSession", reads=False)
    deaf.send(pb.SessionRequest(open=pb.SessionOpen()))
    for n in range(scaled(20000, 2000)):
        deaf.send(pb.SessionRequest(heartbeat=pb.SessionHeartbeat(seq=n)))
    before = server.rss()
    truth(flood.create() != 0, "another session is served")
    if not SANITIZED:
        truth(server.rss() - before < 32 << 20, "heartbeats that nobody reads pile up")
    deaf.cancel()
    flood.close()


@test()
def metadata_of_any_size(server, rng):
    client = server.client()
    method = client.channel.unary_unary(
        "/%s/GetStats" % SERVICE, request_serializer=serialize, response_deserializer=pb.Stats.FromString
    )
    for size, n in ((100, 1), (1000, 1), (100000, 1), (1000, 500)):
        try:
            method(
                pb.GetStatsRequest(),
                timeout=20 * SLOW,
                metadata=[("x-key-%d" % i, "v" * size) for i in range(n)],
            )
        except grpc.RpcError as error:
            truth(
                error.code()
                in (
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    grpc.StatusCode.INTERNAL,
                    grpc.StatusCode.UNAVAILABLE,
                ),
                "code %s" % error.code(),
            )
    truth(len(server.control.stats().pools) == 1, "still answers")
    client.close()


@test()
def reflection_and_health_misuse(server, rng):
    client = server.client()
    for module, package in (
        (reflection_v1, "grpc.reflection.v1"),
        (reflection_v1alpha, "grpc.reflection.v1alpha"),
    ):
        stream = client.bidi(
            "ServerReflectionInfo", package + ".ServerReflection", module.ServerReflectionResponse
        )
        request = module.ServerReflectionRequest
        for data in (
            request(),
            request(file_by_filename="../../etc/passwd"),
            request(file_by_filename=""),
            request(file_containing_symbol="x" * 100000),
            request(all_extension_numbers_of_type="a.b"),
            request(
                file_containing_extension=module.ExtensionRequest(containing_type="a", extension_number=-1)
            ),
        ):
            stream.send(data)
            reply = stream.recv()
            equal(reply.WhichOneof("message_response"), "error_response", "answer to %r" % str(data)[:60])
            truth(reply.error_response.error_code != 0, "an error code")
        stream.send(request(list_services=""))
        equal(stream.recv().WhichOneof("message_response"), "list_services_response", "the stream goes on")
        stream.send(b"\xff\xff")
        try:
            stream.recv()
        except grpc.RpcError as error:
            equal(error.code(), grpc.StatusCode.INVALID_ARGUMENT, "malformed reflection request")
        stream.cancel()
    for name in ("x" * 100000, "a\0b", "dsa.v1"):
        try:
            client.health(name)
            fail("health of %r was answered" % name[:20])
        except grpc.RpcError as error:
            equal(error.code(), grpc.StatusCode.NOT_FOUND, "health of %r" % name[:20])
    try:
        client.call(
            "Check", b"\xff", service="grpc.health.v1.Health", reply_class=health_pb.HealthCheckResponse
        )
        fail("a malformed health request was answered")
    except grpc.RpcError as error:
        equal(error.code(), grpc.StatusCode.INVALID_ARGUMENT, "malformed health request")
    client.close()


if __name__ == "__main__":
    main()
