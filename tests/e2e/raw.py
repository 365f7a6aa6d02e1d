"""raw.py - protobuf by hand and requests of every kind, for the programs that send what no client would."""

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


def memfd(size, seals=fcntl.F_SEAL_SHRINK, allow=True):
    fd = os.memfd_create("hostile", os.MFD_ALLOW_SEALING if allow else 0)
    os.ftruncate(fd, size)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd
