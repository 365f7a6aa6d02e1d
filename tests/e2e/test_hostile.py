#!/usr/bin/python3
"""test_hostile.py - bad input of every kind: a clear error or nothing at all, nothing lost, and the server lives.

After each test the runner checks that no page, sequence, region or session stayed behind and that a fresh client
gets right numbers; so the tests themselves only look at the answers.
"""

from dsatest import *  # noqa: F403

BAD_TENSOR = ("BAD_SHAPE", "BAD_RANGE", "BAD_REQUEST", "TOO_LARGE")

# ---- raw protobuf ----


def varint(n):
    out = bytearray()
    while n > 0x7F:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    return bytes(out) + bytes([n])


def field(number, data):
    """A length-delimited field."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def valid_requests(s, sequence, region, rng):
    """One well-formed request of every unary or server-streaming method, all fields filled."""
    rows = inline(random_rows(rng, 1))
    return {
        "GetCapabilities": pb.GetCapabilitiesRequest(),
        "GetStats": pb.GetStatsRequest(),
        "RegisterRegion": pb.RegisterRegionRequest(
            session=s.token,
            memfd=pb.MemfdRegion(fd_ticket=2**40),
            access=2,
            base_offset=4096,
            size=8192,
            label="label",
        ),
        "UnregisterRegion": pb.UnregisterRegionRequest(session=s.token, region_id=b"0123456789abcdef"),
        "CreateSequence": pb.CreateSequenceRequest(session=s.token, device_uuid="CPU-0"),
        "ForkSequence": pb.ForkSequenceRequest(session=s.token, sequence_id=sequence, n_tokens=3),
        "TruncateSequence": pb.TruncateSequenceRequest(session=s.token, sequence_id=sequence, n_tokens=60),
        "ReleaseSequence": pb.ReleaseSequenceRequest(session=s.token, sequence_id=sequence + 999),
        "GetSequence": pb.GetSequenceRequest(session=s.token, sequence_id=sequence),
        "Append": pb.AppendRequest(
            session=s.token,
            append=pb.AppendOp(
                sequence_id=sequence,
                layer=0,
                n_layers=1,
                rule=2,
                strict=True,
                position=1,
                rows=pb.Tensor(dtype=1, shape=[1, 576], strides_bytes=[1152, 2], region=region.slice(64)),
            ),
        ),
        "ImportRows": pb.ImportRowsRequest(
            session=s.token,
            sequence_id=sequence,
            n_layers=1,
            layout=1,
            rows=pb.Tensor(dtype=4, shape=[1, 656], region=region.slice(64)),
        ),
        "ExportRows": pb.ExportRowsRequest(
            session=s.token, sequence_id=sequence, first=1, n_tokens=2, dtype=1
        ),
        "Attend": pb.AttendRequest(
            session=s.token,
            request_id=9,
            priority=5,
            deadline_us=10**9,
            attend=attend_op(
                sequence,
                pb.Tensor(dtype=1, shape=[1, 2, 576], region=region.slice(4096)),
                pb.Tensor(dtype=3, shape=[1, 4], region=region.slice(0)),
                lengths=np.array([4], np.int32),
                sink=np.zeros(2, np.float32),
                want_lse=True,
                batch_invariant=True,
                phase="decode",
                context_parallel=1,
                out=pb.Output(dtype=1, region=region.slice(8192), strides_bytes=[2048, 1024, 2]),
                append=pb.AppendOp(sequence_id=sequence, rows=rows),
            ),
        ),
        "OpenSession": pb.SessionRequest(
            open=pb.SessionOpen(client_name="name", lease_us=10**6, grace_us=10)
        ),
    }


def fixture(server, rng):
    s = server.session(name="hostile")
    sequence, region = s.create(), s.region(1 << 16)
    s.append(sequence, random_rows(rng, 64))
    return s, sequence, region


def outcome_of(call):
    """Waits for a future; the reason word of a refusal, or OK."""
    try:
        call.result()
        return "OK"
    except grpc.RpcError as error:
        refused = refused_from(error)
        if refused is None:
            fail("refused without a status: %s %s" % (error.code(), error.details()))
        truth(refused.status.reason not in ("INTERNAL", "DEVICE_LOST", "NO_MEMORY"), "answered %s" % refused)
        return refused.status.reason


def fire(server, client, name, payloads):
    """Sends raw payloads to a unary or server-streaming method; {reason: count}."""
    path, counts, waiting = "/%s/%s" % (SERVICE, name), {}, []
    if name in SERVER_STREAMS:

        def collect(data):
            try:
                list(client.export(data))
                return "OK"
            except grpc.RpcError as error:
                truth(refused_from(error) is not None, "refused without a status: %s" % error.details())
                return refused_from(error).status.reason

        outcomes = [collect(p) for p in payloads]
    else:
        method = client.channel.unary_unary(
            path, request_serializer=bytes, response_deserializer=METHODS[name][1].FromString
        )
        outcomes = []
        for data in payloads:
            waiting.append(method.future(data, timeout=30 * SLOW))
            if len(waiting) == 32:
                outcomes += [outcome_of(c) for c in waiting]
                waiting = []
        outcomes += [outcome_of(c) for c in waiting]
    for outcome in outcomes:
        counts[outcome] = counts.get(outcome, 0) + 1
    return counts


def attend_replies(s, payloads):
    """Sends raw messages on an Attend stream of its own, then a good one; every message must have been answered."""
    stream = AttendStream(s)
    stream.send(request_id=1, append=pb.AppendOp())  # binds the stream to its session
    expect_refusal(lambda: stream.wait(1), "NOT_FOUND")
    for data in payloads:
        stream.bidi.send(data)
    marker = 2**63 + 12345
    stream.send(request_id=marker, append=pb.AppendOp(sequence_id=0))
    replies = []
    while True:
        reply = stream.bidi.recv()
        truth(reply is not None, "the stream ended")
        truth(
            reply.status.reason not in ("INTERNAL", "DEVICE_LOST", "NO_MEMORY"), "answered %r" % reply.status
        )
        if reply.request_id == marker:
            break
        replies.append(reply)
    stream.bidi.half_close()
    while True:
        reply = stream.bidi.recv()
        if reply is None:
            return replies
        replies.append(reply)


# ---- truncated and random messages ----


@test()
def every_message_truncated_at_every_byte(server, rng):
    s, sequence, region = fixture(server, rng)
    requests = valid_requests(s, sequence, region, rng)
    for name in METHODS:
        if name in ("Drain", "Attend", "OpenSession"):
            continue
        data = requests[name].SerializeToString()
        counts = fire(
            server, s.client, name, [data[:n] for n in range(len(data) + 1)][:: 1 if len(data) < 400 else 7]
        )
        if data:
            truth(
                counts.get("BAD_REQUEST", 0) > 0,
                "%s: no truncated message was refused as such: %r" % (name, counts),
            )
    counts = fire(server, s.client, "Drain", [b"\x08", b"\x08\xff", b"\x0a\x05ab", b"\xff" * 20])
    equal(counts, {"BAD_REQUEST": 4}, "malformed Drain requests")
    data = requests["Attend"].SerializeToString()
    cuts = [data[:n] for n in range(1, len(data))]
    replies = attend_replies(s, cuts)
    last = [r for r in replies if r.last]
    equal(len(last), len(cuts), "last pieces for truncated messages on a stream")
    truth(all(r.HasField("status") for r in last if r.request_id == 0), "no answer without a status")
    data = requests["OpenSession"].SerializeToString()
    for n in range(len(data)):
        lease = s.client.bidi("OpenSession")
        lease.send(data[:n])
        try:
            event = lease.recv()
            equal(event.WhichOneof("kind"), "opened", "answer to an OpenSession cut at %d" % n)
            lease.half_close()
        except grpc.RpcError as error:
            truth(refused_from(error) is not None, "cut at %d: %s" % (n, error.details()))
    s.close()


@test()
def malformed_messages_are_named(server, rng):
    s, sequence, region = fixture(server, rng)
    for data in (
        b"\xff" * 10,
        b"\x0a\x7f",
        b"\x0a\xff\xff\xff\xff\x0f",
        b"\x08",
        b"\x0b",
        b"\x0c",
        b"\x0f",
        b"\x0a" + varint(2**64 - 1),
        b"\x80" * 11,
        b"\x00\x00",
        field(1, b"")[:-1] + b"\x05",
    ):
        expect_refusal(
            lambda: s.client.call("GetSequence", data), "BAD_REQUEST", code=grpc.StatusCode.INVALID_ARGUMENT
        )
        replies = attend_replies(s, [data])
        equal([r.status.reason for r in replies], ["BAD_REQUEST"], "on a stream")
    s.close()


def mutate(rng, data):
    data = bytearray(data)
    for _ in range(int(rng.integers(1, 5))):
        kind, at = int(rng.integers(0, 6)), int(rng.integers(0, max(1, len(data))))
        if not data or kind == 0:
            data[at:at] = rng.bytes(int(rng.integers(1, 9)))
        elif kind == 1:
            del data[at : at + int(rng.integers(1, 9))]
        elif kind == 2:
            data[at] ^= 1 << int(rng.integers(0, 8))
        elif kind == 3:
            data[at] = int(rng.choice([0, 1, 0x7F, 0x80, 0xFF]))
        elif kind == 4:
            data += data[at : at + 40]
        else:
            data[at : at + 1] = varint(
                int(rng.choice(np.array([2**31, 2**32 - 1, 2**63, 2**64 - 1, 0], np.uint64)))
            )
    return bytes(data)


# Mutated requests write their results over one another's. Merged into one launch, several threads of the device would do
# so at a time, which is the client's own loss, but a race that ThreadSanitizer reports.
@test(**({"batch-rows": 1, "chunk-rows": 1, "cpu-threads": 1} if SANITIZED else {}))
def mutated_and_random_messages(server, rng):
    s, sequence, region = fixture(server, rng)
    for name, request in valid_requests(s, sequence, region, rng).items():
        if name in ("Attend", "OpenSession"):
            continue
        data = request.SerializeToString()
        payloads = [mutate(rng, data) for _ in range(scaled(150))] + [
            rng.bytes(int(rng.integers(0, 80))) for _ in range(scaled(50))
        ]
        fire(server, s.client, name, payloads)
    request = valid_requests(s, sequence, region, rng)["Attend"]
    request.session = b""
    operation = request.SerializeToString()
    for _ in range(scaled(30, 5)):
        stream = AttendStream(s)
        stream.send(request_id=1, append=pb.AppendOp())
        expect_refusal(lambda: stream.wait(1), "NOT_FOUND")
        for _ in range(50):
            stream.bidi.send(
                mutate(rng, operation) if rng.random() < 0.8 else rng.bytes(int(rng.integers(0, 200)))
            )
        stream.send(request_id=2**62 + 1, append=pb.AppendOp())
        try:
            stream.wait(2**62 + 1)
        except Refused as refused:
            equal(refused.status.reason, "NOT_FOUND", "the good message behind the bad ones")
        stream.bidi.cancel()
    for _ in range(scaled(100, 20)):
        lease = s.client.bidi("OpenSession")
        lease.send(
            mutate(
                rng,
                pb.SessionRequest(open=pb.SessionOpen(client_name="x", lease_us=10**7)).SerializeToString(),
            )
        )
        lease.half_close()  # not a cancel: the mutation may have asked for a time of grace
        try:
            while lease.recv() is not None:
                pass
        except grpc.RpcError:
            pass
    s.close()


# ---- protobuf corners (NET-06) ----


@test()
def protobuf_corners(server, rng):
    s, sequence, region = fixture(server, rng)
    session = field(1, s.token)
    plain = session + b"\x10" + varint(sequence)
    q, indices = random_q(rng, 1, 2), random_indices(rng, 1, 8, 64)
    good = pb.AttendRequest(
        session=s.token, request_id=1, attend=attend_op(sequence, q, indices)
    ).SerializeToString()
    expected = s.attend(sequence, q, indices).out_bits.tobytes()

    def get(data):
        return s.client.call("GetSequence", data)

    # unknown fields of every wire type, also a MiB of them, are no reason to refuse
    unknown = (
        varint(1000 << 3) + b"\x05" + varint(1001 << 3 | 1) + bytes(8) + varint(1003 << 3 | 5) + bytes(4)
    )
    for extra in (unknown, field(1002, bytes(1 << 20)), field(1002, b"x") * 200, field(536870911, b"")):
        equal(get(plain + extra).id, sequence, "with unknown fields")
        replies = attend_replies(s, [good + extra])
        equal([(r.status.reason, r.out) for r in replies], [("", expected)], "attend with unknown fields")
    many = plain + field(1002, b"x") * 50000  # more parts than a message may cost: taken, or refused as such
    try:
        equal(get(many).id, sequence, "with 50000 unknown fields")
    except grpc.RpcError as error:
        equal(refused_from(error).status.reason, "BAD_REQUEST", "50000 unknown fields")
    # the last of a repeated singular field wins; repeated sub-messages are merged
    equal(get(session + b"\x10\x01" + plain).id, sequence, "duplicate singular fields")
    equal(get(field(1, b"wrong") * 1000 + plain).id, sequence, "a thousand tokens, the last is right")
    twice = pb.AttendRequest(request_id=1, append=pb.AppendOp(sequence_id=1)).SerializeToString() + good
    for data in (twice, good + good, good + field(5, b""), field(4, b"") * 100 + good):
        truth(attend_replies(s, [data]) is not None, "two operations in one message")
    # nesting, groups, packed lists beyond their end
    for data in (
        varint(100 << 3 | 3) * 20000,
        varint(100 << 3 | 3) * 1000 + varint(100 << 3 | 4) * 1000,
        field(2, field(2, field(2, b"\x0a"))),
        field(3, field(3, field(2, varint(5)))),
        field(3, field(3, b"\x12" + varint(2**31) + b"\x01\x02")),
        field(3, field(3, b"\x12" + varint(2**32 + 5) + b"\x01\x02")),
        field(3, field(3, b"\x1a\x05" + b"\xff" * 5)),
    ):
        for reply in attend_replies(s, [session + b"\x10\x07" + data]):
            truth(reply.HasField("status"), "accepted %r" % data[:20])
    deep = b""
    for _ in range(1000):
        deep = field(3, deep)
    attend_replies(s, [session + deep])
    s.close()


@test()
def huge_repeated_fields(server, rng):
    """Counts far beyond any limit: refused by name, at a cost in proportion to the message, memory given back."""
    s, sequence, region = fixture(server, rng)
    before = server.rss()
    n = 2 << 20 if not SANITIZED else 200000
    q, indices = inline(random_q(rng, 1, 2)), inline(np.zeros((1, 4), np.int32))
    base = attend_op([(sequence, 1)], q, indices)

    def changed(**change):
        op = pb.AttendOp.FromString(base.SerializeToString())
        for name, value in change.items():
            target = op
            for part in name.split("__")[:-1]:
                target = getattr(target, part)
            getattr(target, name.split("__")[-1]).extend(value)
        return pb.AttendRequest(session=s.token, request_id=77, attend=op).SerializeToString()

    cases = {
        "attend.q.shape": changed(q__shape=[1] * n),
        "attend.q.strides_bytes": changed(q__strides_bytes=[1] * n),
        "attend.indices.shape": changed(indices__shape=[1] * n),
        "attend.segments": changed(segments=[pb.Segment(sequence_id=sequence, n_rows=1)] * (n // 20)),
        "attend.out.strides_bytes": changed(out__strides_bytes=[1] * n),
    }
    for name, data in cases.items():
        replies = attend_replies(s, [data])
        equal(len(replies), 1, "answers")
        status = replies[0].status
        if name.startswith("attend.out") and not status.reason:
            continue  # an inline output: strides say nothing there
        truth(status.reason in BAD_TENSOR, "%s: %r" % (name, status))
        truth(status.field.startswith(name[:14]) or "segments" in name, "%s: field %r" % (name, status.field))
    # the same, unpacked: one tag per number
    tensor = b"\x08\x01" + b"\x10\x01" * n
    unpacked = field(1, s.token) + b"\x10\x4d" + field(3, field(3, tensor))
    equal(len(attend_replies(s, [unpacked])), 1, "answers to unpacked numbers")
    segments = field(1, s.token) + b"\x10\x4d" + field(3, field(2, b"") * n)
    equal(attend_replies(s, [segments])[0].status.reason in BAD_TENSOR, True, "two million empty segments")
    if not SANITIZED:
        wait_until(
            lambda: server.rss() < before + (64 << 20),
            5,
            "memory is given back (before %d MiB, now %d MiB)" % (before >> 20, server.rss() >> 20),
        )
    s.close()


@test()
def invalid_text(server, rng):
    """Strings that are no UTF-8, or hold a NUL: taken or refused, but the answer is always readable."""
    s, sequence, region = fixture(server, rng)
    for text in (
        b"\xff\xfe",
        b"a\0b",
        b"\xc3",
        b"\xed\xa0\x80",
        b"\xf8\x88\x80\x80\x80",
        bytes(range(1, 32)),
        b"\x7f" * 64,
    ):
        lease = s.client.bidi("OpenSession")
        lease.send(field(1, field(1, text)))
        try:
            equal(lease.recv().WhichOneof("kind"), "opened", "client_name %r" % text)
            lease.half_close()
        except grpc.RpcError as error:
            truth(refused_from(error) is not None, "client_name %r: %s" % (text, error.details()))
        for name, data in (
            ("CreateSequence", field(1, s.token) + field(2, text)),
            (
                "RegisterRegion",
                field(1, s.token) + field(8, text) + b"\x28\x01\x38\x80\x20" + field(2, b"\x08\x63"),
            ),
        ):
            expect_refusal(lambda: s.client.call(name, data), ("BAD_REQUEST", "NOT_FOUND", "BAD_FD"))
        op = attend_op(sequence, random_q(rng, 1, 1), np.zeros((1, 1), np.int32)).SerializeToString() + field(
            14, text
        )
        replies = attend_replies(s, [field(1, s.token) + b"\x10\x03" + field(3, op)])
        equal([r.status.reason for r in replies], ["BAD_REQUEST"], "phase %r" % text)
    s.close()


@test()
def enums_out_of_range(server, rng):
    s, sequence, region = fixture(server, rng)
    for value in (8, 99, 2**31 - 1, -1, -(2**31)):
        raw = varint(value & (2**64 - 1))
        for number, name in ((1, "q"), (2, "indices")):
            op = pb.AttendOp.FromString(
                attend_op(sequence, random_q(rng, 1, 2), np.zeros((1, 4), np.int32)).SerializeToString()
            )
            tensor = getattr(op, name).SerializeToString() + b"\x08" + raw
            data = op.SerializeToString() + field(2 + number, tensor)
            replies = attend_replies(s, [field(1, s.token) + b"\x10\x03" + field(3, data)])
            truth(
                len(replies) == 1 and replies[0].status.reason in ("UNSUPPORTED", "BAD_SHAPE", "BAD_REQUEST"),
                "dtype %d of %s: %r" % (value, name, [r.status for r in replies]),
            )
        op = attend_op(sequence, random_q(rng, 1, 2), np.zeros((1, 4), np.int32)).SerializeToString()
        for number, name in ((5, "attend.space"), (9, "attend.out.dtype")):
            data = op + (varint(5 << 3) + raw if number == 5 else field(9, b"\x08" + raw))
            replies = attend_replies(s, [field(1, s.token) + b"\x10\x03" + field(3, data)])
            equal(
                [(r.status.reason, r.status.field) for r in replies],
                [("BAD_REQUEST", name)],
                "%s %d" % (name, value),
            )
            truth(
                str(value) in replies[0].status.value,
                "value %r does not name %d" % (replies[0].status.value, value),
            )
        append = field(1, s.token) + field(
            2,
            b"\x08"
            + varint(sequence)
            + field(4, inline(random_rows(rng, 1)).SerializeToString())
            + b"\x28"
            + raw,
        )
        expect_refusal(lambda: s.client.call("Append", append), "BAD_REQUEST", "append.rule", value)
        expect_refusal(
            lambda: s.client.call(
                "ImportRows", field(1, s.token) + b"\x10" + varint(sequence) + b"\x28" + raw
            ),
            "BAD_LAYOUT",
            "layout",
            value,
        )
        expect_refusal(
            lambda: s.client.call(
                "RegisterRegion", field(1, s.token) + field(2, b"\x08\x01") + b"\x28" + raw + b"\x38\x80\x20"
            ),
            "BAD_REQUEST",
            "access",
            value,
        )
        export = field(1, s.token) + b"\x10" + varint(sequence) + b"\x30" + raw
        expect_refusal(lambda: list(s.client.export(export)), "BAD_REQUEST", "dtype", value)
    s.close()


# ---- tensors ----


@test()
def shapes_that_do_not_fit(server, rng):
    """Every tensor of every request, with each kind of wrong shape: the field is named."""
    s, sequence, region = fixture(server, rng)
    good = {
        "q": random_q(rng, 2, 3),
        "indices": np.zeros((2, 4), np.int32),
        "lengths": np.ones(2, np.int32),
        "sink": np.zeros(3, np.float32),
    }
    shapes = [
        [],
        [0],
        [2**64 - 1],
        [2**63],
        [2**32, 2**32],
        [2**31, 656],
        [2**32, 2**32, 2**32],
        [2**32, 3, 576],
        [2, 2**63, 576],
        [2, 3, 2**63 + 576],
        [2, 3, 0],
        [0, 3, 576],
        [2, 0, 576],
        [2, 3, 575],
        [1, 3, 576],
        [3, 3, 576],
        [2, 4, 576],
        [2, 3, 576, 1],
        [1] * 9,
        [2, 0],
        [0, 4],
        [2, 2**62],
        [3, 4],
        [1, 4],
        [2, 4, 1],
        [3],
        [1],
        [2**62],
        [2**30, 2**30, 2**4],
    ]
    for name, values in good.items():
        for shape in shapes:
            if tuple(shape) == values.shape or (name == "q" and shape == [2, 4, 576]):
                continue  # (the latter fits q; the sink refuses it)
            for kind in ("inline", "region", "huge region"):
                tensor = pb.Tensor(dtype=DTYPES[values.dtype], shape=shape)
                if kind == "inline":
                    tensor.inline = values.tobytes()
                else:
                    tensor.region.CopyFrom(region.slice(0 if kind == "region" else 2**64 - 4096))
                status = expect_refusal(
                    lambda: s.attend([(sequence, 2)], **{**good, name: tensor}), BAD_TENSOR + ("UNSUPPORTED",)
                )
                truth(
                    status.field.startswith(
                        ("attend." + name, "attend.sink", "d_qk", "heads", "q.", "attend.indices")
                    ),
                    "%s of shape %r: field %r" % (name, shape, status.field),
                )
    for shape in shapes + [[1, 576, 1, 1, 1], [2, 1, 576], [1, 1152]]:
        for tensor in (
            pb.Tensor(dtype=1, shape=shape, inline=bytes(1152)),
            pb.Tensor(dtype=1, shape=shape, region=region.slice()),
        ):
            if shape in ([2, 3, 576], [1, 3, 576]):
                continue
            status = expect_refusal(lambda: s.append(sequence, tensor), BAD_TENSOR)
            truth(status.field.startswith("append.rows"), "append of %r: field %r" % (shape, status.field))
            tensor.dtype = 4
            status = expect_refusal(lambda: s.import_rows(sequence, tensor), BAD_TENSOR)
            truth(status.field.startswith("rows"), "import of %r: field %r" % (shape, status.field))
    for n in (0, 1, 1151, 1153, 4096):  # not exactly the dense size
        tensor = pb.Tensor(dtype=1, shape=[1, 576], inline=bytes(n))
        expect_refusal(lambda: s.append(sequence, tensor), "BAD_SHAPE", "append.rows.inline", n)
    expect_refusal(
        lambda: s.append(sequence, pb.Tensor(dtype=1, shape=[1, 576])), "BAD_REQUEST", "append.rows.data"
    )
    expect_refusal(
        lambda: s.call("Append", append=pb.AppendOp(sequence_id=sequence)), "BAD_REQUEST", "append.rows"
    )
    expect_refusal(lambda: s.call("Append"), "BAD_REQUEST", "append")
    for missing in ("q", "indices"):
        op = attend_op([(sequence, 2)], **good)
        op.ClearField(missing)
        expect_refusal(lambda: s.stream.wait(s.stream.start(op)), "BAD_REQUEST", "attend." + missing)
    for layer in (1, 2**31, 2**32 - 1):
        expect_refusal(
            lambda: s.attend([(sequence, 2)], **good, layer=layer), "BAD_RANGE", "attend.layer", layer
        )
        expect_refusal(
            lambda: s.append(sequence, random_rows(rng, 1), layer=layer), "BAD_RANGE", "append.layer", layer
        )
        expect_refusal(
            lambda: s.append(
                sequence, random_rows(rng, 1), n_layers=layer + 1 if layer < 2**32 - 1 else layer
            ),
            ("BAD_RANGE", "BAD_SHAPE"),
        )
    expect_refusal(
        lambda: s.attend([(sequence, 2)], **good, lse=pb.Output(region=region.slice())),
        "BAD_REQUEST",
        "attend.lse",
    )
    s.close()


@test()
def offsets_that_wrap(server, rng):
    """IPC-02: a region with a base offset of 4096 and 8192 bytes."""
    s = server.session()
    sequence = s.create()
    file_bytes = 4096 + 8192
    region = s.region(8192, base_offset=4096, file_size=file_bytes)
    whole = np.frombuffer(region.map, np.uint8)
    whole[:] = 0x11
    rows = quantize(MAIN, random_rows(rng, 12))[0]
    region.bytes[: 12 * 656] = rows.reshape(-1)
    region.bytes[8192 - 656 :] = rows[3]

    def tensor(offset, n=1):
        return pb.Tensor(dtype=4, shape=[n, 656], region=region.slice(offset))

    s.import_rows(sequence, tensor(0, 11))
    s.import_rows(sequence, tensor(8192 - 656))
    same_bits(
        s.export(sequence), np.concatenate([rows[:11], rows[3:4]]), "rows read from behind the base offset"
    )
    for offset, n in (
        (8192 - 655, 1),
        (8191, 1),
        (8192, 1),
        (0, 13),
        (656, 12),
        (8193, 1),
        (12288, 1),
        (2**64 - 1, 1),
        (2**64 - 656, 1),
        (2**64 - 4096, 1),
        (2**64 - 4096, 7),
        (2**64 - 8192, 1),
        (2**63, 1),
        (2**63 - 1, 1),
        (2**32, 1),
        (2**64 - 656 * 2**20, 2**20),
        (1, 2**64 // 656),
        (2**63, 2**63 // 656),
    ):
        status = expect_refusal(lambda: s.import_rows(sequence, tensor(offset, n)), BAD_TENSOR)
        if n == 1:
            equal(
                status.code
                in (grpc.StatusCode.OUT_OF_RANGE.value[0], grpc.StatusCode.INVALID_ARGUMENT.value[0]),
                True,
                "code",
            )
            truth(status.field.startswith("rows.region"), "field %r" % status.field)
            truth(
                str(offset) in status.value + status.message,
                "%r does not name the offset %d" % (status, offset),
            )
    q, indices = random_q(rng, 1, 2), np.zeros((1, 4), np.int32)
    for offset in (8192 - 2047, 8192, 2**64 - 2, 2**63, 2**64 - 2048, 1):
        for name in ("out", "lse"):
            kinds = {
                name: pb.Output(region=region.slice(offset + (6 if name == "lse" and offset == 6145 else 0)))
            }
            if name == "lse" and offset == 8192 - 2047:
                kinds = {name: pb.Output(region=region.slice(8192 - 4))}
            status = expect_refusal(
                lambda: s.attend(sequence, q, indices, want_lse=True, **kinds), BAD_TENSOR
            )
            truth(status.field.startswith("attend.%s.region" % name), "field %r" % status.field)
    truth((whole[:4096] == 0x11).all(), "bytes before the region changed")
    s.close()


def memfd(size, seals=fcntl.F_SEAL_SHRINK, allow=True):
    fd = os.memfd_create("hostile", os.MFD_ALLOW_SEALING if allow else 0)
    os.ftruncate(fd, size)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@test()
def descriptors_that_will_not_do(server, rng):
    s = server.session()
    expected_fds = server.n_fds()

    def register(fd, access=1, size=4096, base_offset=0):
        return s.call(
            "RegisterRegion",
            memfd=pb.MemfdRegion(fd_ticket=s.offer(fd)),
            access=access,
            size=size,
            base_offset=base_offset,
        )

    def refused(fd, reason, field, value=None, close=True, **options):
        expect_refusal(lambda: register(fd, **options), reason, field, value)
        if close:
            os.close(fd)

    s.fd_socket()
    expected_fds = server.n_fds()
    ticket = "memfd.fd_ticket"
    refused(memfd(4096, 0), "BAD_FD", ticket, "seals")
    refused(memfd(4096, fcntl.F_SEAL_GROW), "BAD_FD", ticket, "seals")
    refused(memfd(4096, 0, allow=False), "BAD_FD", ticket)
    refused(os.open("/dev/zero", os.O_RDWR), "BAD_FD", ticket)
    refused(os.open("/dev/null", os.O_RDWR), "BAD_FD", ticket)
    refused(os.open("/tmp", os.O_RDONLY), "BAD_FD", ticket)
    refused(os.open("/tmp", os.O_PATH), "BAD_FD", ticket)
    with tempfile.TemporaryFile() as f:
        f.truncate(4096)
        refused(os.dup(f.fileno()), "BAD_FD", ticket)
    read_end, write_end = os.pipe()
    refused(read_end, "BAD_FD", ticket)
    os.close(write_end)
    pair = socket.socketpair()
    refused(os.dup(pair[0].fileno()), "BAD_FD", ticket)
    for each in pair:
        each.close()
    for size in (4097, 8192, 1 << 30):
        refused(memfd(4096), "BAD_RANGE", "size", size=size)
    refused(memfd(8192), "BAD_RANGE", "size", size=8192, base_offset=4096)
    refused(memfd(8192), "BAD_RANGE", "size", 0, size=0)
    refused(memfd(8192), "BAD_RANGE", "base_offset", 100, base_offset=100)
    for base, size in ((2**64 - 4096, 4096), (2**64 - 4096, 8192), (2**63, 4096), (2**63 - 4096, 4096)):
        expect_refusal(lambda: register(memfd(8192), base_offset=base, size=size), ("BAD_RANGE", "TOO_LARGE"))
    for size in (2**63, 2**64 - 1, 2**64 - 4096):
        expect_refusal(lambda: register(memfd(8192), size=size), ("BAD_RANGE", "TOO_LARGE"), "size", size)
    sealed = memfd(4096, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
    refused(sealed, "BAD_FD", "access", access=2, close=False)
    equal(register(sealed, access=1).size, 4096, "a memfd sealed against writing can be read")
    os.close(sealed)
    future = memfd(4096, fcntl.F_SEAL_SHRINK | 0x10)  # F_SEAL_FUTURE_WRITE
    refused(future, "BAD_FD", "access", access=2)
    both = memfd(4096)
    read_only = os.open("/proc/self/fd/%d" % both, os.O_RDONLY)
    refused(read_only, "BAD_FD", "access", access=2, close=False)
    equal(register(read_only, access=1).size, 4096, "a read-only descriptor can be read")
    os.close(read_only)
    os.close(both)
    for access in (0, 3, 99):
        expect_refusal(lambda: register(memfd(4096), access=access), "BAD_REQUEST", "access", access)
    expect_refusal(lambda: s.call("RegisterRegion", access=1, size=4096), "BAD_REQUEST", "kind")
    s.close()
    wait_until(
        lambda: server.n_fds() <= expected_fds,
        5 * SLOW,
        "descriptors are closed (%d, now %d)" % (expected_fds, server.n_fds()),
    )


@test()
def regions_keep_their_rights(server, rng):
    s, sequence, _ = fixture(server, rng)
    readable = s.region(1 << 16, access=pb.REGION_ACCESS_READ)
    q, indices = random_q(rng, 1, 2), np.zeros((1, 4), np.int32)
    s.attend([(sequence, 1)], readable.put(q), indices)
    for name in ("out", "lse"):
        fields = {name: pb.Output(region=readable.slice())}
        status = expect_refusal(
            lambda: s.attend(sequence, q, indices, want_lse=True, **fields),
            "ACCESS_DENIED",
            code=grpc.StatusCode.PERMISSION_DENIED,
        )
        truth(status.field.startswith("attend.%s.region" % name), "field %r" % status.field)
    s.close()


@test()
def memory_that_changes_under_us(server, rng):
    """Indices, lengths and rows scribbled over while they are read; holes punched; the file cannot shrink."""
    s, sequence, _ = fixture(server, rng)
    region = s.region(1 << 20)
    q = random_q(rng, 8, 4)
    tensor_q, indices = region.put(q), region.put(random_indices(rng, 8, 256, 64), 0x20000)
    lengths = region.put(np.full(8, 256, np.int32), 0x40000)
    out = pb.Output(dtype=pb.DTYPE_F32, region=region.slice(0x80000))
    stop = threading.Event()
    noise = np.random.default_rng(5)

    def scribble():
        wild = region.view(np.int32, (8, 256), 0x20000), region.view(np.int32, (8,), 0x40000)
        while not stop.is_set():
            wild[0][...] = noise.integers(-(2**31), 2**31, (8, 256))
            wild[1][...] = noise.integers(-(2**31), 2**31, 8)
            wild[0][...] = noise.integers(0, 64, (8, 256))

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        for _ in range(scaled(300, 50)):
            s.attend([(sequence, 8)], tensor_q, indices, lengths=lengths, out=out)
            truth(
                np.isfinite(region.view(np.float32, (8, 4, 512), 0x80000)).all(),
                "a result that is not finite",
            )
    finally:
        stop.set()
        thread.join()
    fd = memfd(1 << 16)
    with mmap.mmap(fd, 0) as view:
        view[: 656 * 4] = quantize(MAIN, random_rows(rng, 4))[0].tobytes()
        ticket = s.offer(fd)
        known = s.call("RegisterRegion", memfd=pb.MemfdRegion(fd_ticket=ticket), access=2, size=1 << 16)
        try:
            os.ftruncate(fd, 0)
            fail("a sealed memfd was shrunk")
        except PermissionError:
            pass
        FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        equal(
            libc.fallocate(fd, FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, 0, 1 << 16), 0, "punching a hole"
        )
        tensor = pb.Tensor(dtype=4, shape=[4, 656], region=pb.RegionSlice(region_id=known.id))
        s.import_rows(sequence, tensor)
        truth((s.export(sequence, first=64) == 0).all(), "a hole reads as zeros")
    os.close(fd)
    s.close()


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


def http2_frame(kind, flags, stream, payload):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def http2_call(path, data):
    """A connection's first bytes: preface, SETTINGS, one request's HEADERS and DATA."""
    headers = b""
    for name, value in (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "localhost"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ):
        headers += b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    return (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + http2_frame(4, 0, 0, b"")
        + http2_frame(1, 4, 1, headers)
        + http2_frame(0, 0, 1, data)
    )


def connect(path):
    s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    s.settimeout(10 * SLOW)
    s.connect(path)
    return s


def read_until(connection, done):
    data = b""
    try:
        while not done(data):
            part = connection.recv(65536)
            if not part:
                break
            data += part
    except (socket.timeout, ConnectionError):
        pass
    return data


@test()
def declared_sizes_are_not_allocated(server, rng):
    """2 GiB and more announced in the length prefix, nothing behind it."""
    path = "/%s/GetStats" % SERVICE
    settings_ack = http2_frame(4, 1, 0, b"")
    before = server.rss()
    held = []
    for size in (2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, (8 << 20) + 1) * 4:
        connection = connect(server.path)
        connection.sendall(http2_call(path, b"\0" + struct.pack(">I", size) + bytes(100)))
        held.append(connection)
    for connection in held:  # the server has read it all, and either waits for the rest or has refused
        truth(
            settings_ack in read_until(connection, lambda d: settings_ack in d),
            "the connection was not served",
        )
    for size in (8 << 20, 1 << 20):  # allowed, but never sent in full
        connection = connect(server.path)
        connection.sendall(http2_call(path, b"\0" + struct.pack(">I", size) + bytes(100)))
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
    headers = http2_call("/%s/GetStats" % SERVICE, b"\0\0\0\0\0")
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
        headers + http2_frame(0, 1, 1, b""),
    ]
    samples += [rng.bytes(int(rng.integers(1, 5000))) for _ in range(20)]
    samples += [preface + rng.bytes(int(rng.integers(1, 5000))) for _ in range(20)]
    samples += [
        preface
        + http2_frame(4, 0, 0, b"")
        + http2_frame(
            int(rng.integers(0, 12)),
            int(rng.integers(0, 256)),
            int(rng.integers(0, 5)),
            rng.bytes(int(rng.integers(0, 200))),
        )
        for _ in range(scaled(100, 20))
    ]
    samples += [headers + http2_frame(3, 0, 1, struct.pack(">I", 8))] * 20  # reset at once
    samples += [
        preface + http2_frame(4, 0, 0, b"") + http2_frame(1, 0, 1, b"\0\x03abc\x7f" + b"x" * 127) * 50
    ]
    held = []
    for data in samples:
        connection = connect(server.path)
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
    connection = connect(server.path)
    first = http2_call("/%s/Attend" % SERVICE, b"")
    connection.sendall(first)
    headers = first[first.index(b"\x01\x04\0\0\0\x01") + 6 :]
    block = headers[: len(headers) - 9]
    connection.setblocking(False)
    sent = 0
    for stream in range(3, 2 * scaled(2000, 300), 2):
        try:
            connection.send(
                http2_frame(1, 4, stream, block) + http2_frame(3, 0, stream, struct.pack(">I", 8))
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
