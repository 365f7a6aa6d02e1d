#!/usr/bin/python3
"""test_hostile.py - bad input of every kind: a clear error or nothing at all, nothing lost, and the server lives.

After each test the runner checks that no page, sequence, region or session stayed behind and that a fresh client
gets right numbers; so the tests themselves only look at the answers.
"""

from raw import *  # noqa: F403

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


@test(**{"max-message-bytes": "64MiB"})
def packed_list_of_sixteen_million(server, rng):
    """NET-06: 2^24 packed numbers, and one that claims 2^24 and ends early: refused, and the memory comes back."""
    s, sequence, region = fixture(server, rng)
    n, before = full(1 << 24, 1 << 20), server.rss()
    for size, count in ((n, n), (n, 100)):
        shape = b"\x12" + varint(size) + b"\1" * count
        tensor = b"\x08\x01" + shape
        replies = attend_replies(s, [field(1, s.token) + b"\x10\x4d" + field(3, field(3, tensor))])
        equal(len(replies), 1, "answers")
        truth(replies[0].status.reason in BAD_TENSOR, "%d of %d numbers: %r" % (count, size, replies[0].status))
    if not SANITIZED:
        wait_until(lambda: server.rss() < before + (64 << 20), 5, "memory is given back")
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


if __name__ == "__main__":
    main()
