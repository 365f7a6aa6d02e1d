#!/usr/bin/python3
"""test_api.py - what the service answers when it is used as documented: discovery, health, numbers, sequences."""

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from dsatest import *  # noqa: F403

# ---- discovery ----


def reflect(client, module, package, requests):
    """One reflection stream; returns the responses in order."""
    stream = client.bidi(
        "ServerReflectionInfo", package + ".ServerReflection", module.ServerReflectionResponse
    )
    replies = []
    for fields in requests:
        stream.send(module.ServerReflectionRequest(**fields))
        replies.append(stream.recv())
    stream.half_close()
    equal(stream.recv(), None, "after the half-close")
    return replies


def reflection_pool(client, module, package):
    """A descriptor pool made from nothing but what the server says."""
    files = {}

    def fetch(fields):
        reply = reflect(client, module, package, [fields])[0]
        equal(reply.WhichOneof("message_response"), "file_descriptor_response", "reflection answer")
        for data in reply.file_descriptor_response.file_descriptor_proto:
            proto = descriptor_pb2.FileDescriptorProto.FromString(data)
            files[proto.name] = proto

    fetch({"file_containing_symbol": SERVICE})
    while True:
        missing = {d for f in files.values() for d in f.dependency} - set(files)
        if not missing:
            break
        fetch({"file_by_filename": missing.pop()})
    pool, added = descriptor_pool.DescriptorPool(), set()

    def add(name):
        if name not in added:
            added.add(name)
            for dependency in files[name].dependency:
                add(dependency)
            pool.Add(files[name])

    for name in list(files):
        add(name)
    return pool


def check_reflection(server, module, package):
    client = server.client()
    listed, missing, by_name = reflect(
        client,
        module,
        package,
        [
            {"list_services": ""},
            {"file_containing_symbol": "dsa.v1.Nothing"},
            {"file_by_filename": "dsa/v1/dsa.proto"},
        ],
    )
    names = sorted(s.name for s in listed.list_services_response.service)
    equal(
        names,
        [
            "dsa.v1.SparseAttention",
            "grpc.health.v1.Health",
            "grpc.reflection.v1.ServerReflection",
            "grpc.reflection.v1alpha.ServerReflection",
        ],
        "services",
    )
    equal(missing.error_response.error_code, grpc.StatusCode.NOT_FOUND.value[0], "unknown symbol")
    truth(by_name.HasField("file_descriptor_response"), "file by its name")
    pool = reflection_pool(client, module, package)
    method = pool.FindServiceByName(SERVICE).FindMethodByName("GetCapabilities")
    factory = message_factory.MessageFactory(pool)
    request, reply = factory.GetPrototype(method.input_type), factory.GetPrototype(method.output_type)
    answer = client.call("GetCapabilities", request(), reply_class=reply)
    equal(answer.pools[0].page_tokens, 64, "page_tokens through reflected classes")
    sequence = factory.GetPrototype(pool.FindMessageTypeByName("dsa.v1.CreateSequenceRequest"))
    with server.session() as s:
        made = client.call(
            "CreateSequence",
            sequence(session=s.token),
            reply_class=factory.GetPrototype(pool.FindMessageTypeByName("dsa.v1.Sequence")),
        )
        truth(made.id != 0, "a sequence made with reflected classes")
    client.close()


@test()
def reflects_v1(server, rng):
    check_reflection(server, reflection_v1, "grpc.reflection.v1")


@test()
def reflects_v1alpha(server, rng):
    check_reflection(server, reflection_v1alpha, "grpc.reflection.v1alpha")


@test()
def health_check_and_watch(server, rng):
    client = server.client()
    serving = health_pb.HealthCheckResponse.SERVING
    for name in ("", SERVICE):
        equal(client.health(name).status, serving, "health of %r" % name)
    try:
        client.health("no.such.Service")
        fail("health of an unknown service was answered")
    except grpc.RpcError as error:
        equal(error.code(), grpc.StatusCode.NOT_FOUND, "health of an unknown service")
    for name, expected in (
        (SERVICE, serving),
        ("", serving),
        ("no.such", health_pb.HealthCheckResponse.SERVICE_UNKNOWN),
    ):
        watch = client.channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            request_serializer=serialize,
            response_deserializer=health_pb.HealthCheckResponse.FromString,
        )
        call = watch(health_pb.HealthCheckRequest(service=name), timeout=20 * SLOW)
        equal(next(iter(call)).status, expected, "watch of %r" % name)
        truth(call.is_active(), "the watch of %r ended after its first answer" % name)
        call.cancel()


@test(
    **{"layout": "scaled_512_64", "max-rows": 777, "max-topk": 999, "max-inline-bytes": "1MiB", "layers": 2}
)
def capabilities_tell_the_limits(server, rng):
    c = server.capabilities
    truth(c.version != "" and c.build != "", "version and build are given")
    equal([d.kind for d in c.devices], ["cpu"], "devices")
    truth(
        c.devices[0].healthy and c.devices[0].uuid and c.devices[0].memory_bytes > 0,
        "device %r" % c.devices[0],
    )
    pool = c.pools[0]
    equal(
        (
            pool.layout,
            pool.row_bytes,
            pool.page_tokens,
            pool.n_layers,
            pool.n_pages,
            pool.d_qk,
            pool.d_v,
            pool.write_rule,
            pool.device_uuid,
        ),
        (pb.LAYOUT_SCALED_512_64, 656, 64, 2, 256, 576, 512, pb.WRITE_RULE_POW2, c.devices[0].uuid),
        "pool",
    )
    limits = c.limits
    equal(
        (limits.max_rows, limits.max_topk, limits.max_inline_bytes),
        (777, 999, 1 << 20),
        "limits as configured",
    )
    for field, value in ((f.name, getattr(limits, f.name)) for f in limits.DESCRIPTOR.fields):
        truth(value > 0, "limit %s is not told" % field)
    for word in ("inline", "memfd", "append_in_attend"):
        truth(word in c.features, "feature %r is not told" % word)
    truth(not c.physical_indices, "physical indices are off unless asked for")
    truth(c.fd_socket and os.path.exists(c.fd_socket), "fd_socket %r" % c.fd_socket)
    served = {layout for r in c.rules if r.accept and r.device_kind == "cpu" for layout in r.layouts}
    equal(served, set(range(1, 8)), "layouts that a rule accepts on the CPU")
    truth(any(not r.accept for r in c.rules), "refusing rules are listed too")
    for rule in c.rules:
        truth(rule.name and rule.reason, "a rule without a name or reason: %r" % rule)
    equal(len({r.name for r in c.rules}), len(c.rules), "distinct rule names")


@test()
def wrong_method_is_unimplemented(server, rng):
    for service, name in ((SERVICE, "NoSuchMethod"), ("no.such.Service", "GetStats")):
        try:
            server.control.call(name, b"", service=service, reply_class=pb.Stats)
            fail("%s/%s was answered" % (service, name))
        except grpc.RpcError as error:
            equal(error.code(), grpc.StatusCode.UNIMPLEMENTED, "%s/%s" % (service, name))


# ---- session ----


@test()
def session_opens_beats_and_closes(server, rng):
    client = server.client()
    with Session(client, name="first", lease_us=5000000) as s:
        equal(len(s.token), 16, "bytes of a token")
        equal(s.opened.lease_us, 5000000, "lease as granted")
        equal(s.opened.grace_us, 0, "grace as granted")
        equal(s.opened.fd_socket, server.capabilities.fd_socket, "fd socket")
        truth(not s.opened.reattached, "a new session")
        for n in (1, 77, 2**64 - 1):
            s.lease.send(pb.SessionRequest(heartbeat=pb.SessionHeartbeat(seq=n)))
            equal(s.lease.recv().heartbeat.seq, n, "heartbeat echo")
        with Session(client) as other:
            truth(other.token != s.token, "two sessions, two tokens")
            equal(server.control.stats().n_sessions, 2, "sessions")
            sequence = s.create()
            expect_refusal(lambda: other.get(sequence), "NOT_FOUND", "sequence_id", sequence)
    for field in ("lease_us", "grace_us"):  # more than the limit: cut to it, or refused by name
        lease = client.bidi("OpenSession")
        lease.send(pb.SessionRequest(open=pb.SessionOpen(**{field: 2**63})))
        try:
            granted = getattr(lease.recv().opened, field)
            equal(granted, getattr(server.capabilities.limits, "max_" + field), "%s as granted" % field)
        except grpc.RpcError as error:
            equal(refused_from(error).status.field, "open." + field, "field")
        lease.half_close()
    for first, field in (
        (pb.SessionRequest(heartbeat=pb.SessionHeartbeat(seq=1)), "kind"),
        (pb.SessionRequest(), "kind"),
        (pb.SessionRequest(open=pb.SessionOpen(client_name="x" * 65)), "open.client_name"),
    ):
        lease = client.bidi("OpenSession")
        lease.send(first)
        expect_refusal(lease.recv, ("FAILED_PRECONDITION", "BAD_REQUEST"), field)
    lease = client.bidi("OpenSession")
    lease.half_close()
    expect_refusal(lease.recv, "FAILED_PRECONDITION", "kind")
    for token in (b"", b"x", b"x" * 15, b"x" * 16, b"x" * 17):
        expect_refusal(
            lambda: client.call("CreateSequence", session=token),
            "NO_SESSION",
            "session",
            code=grpc.StatusCode.UNAUTHENTICATED,
        )
    client.close()


# ---- rows: byte for byte ----


def corner_rows(layout):
    """Zero groups, -0, one lone value at each end of a group, amax 450, tiny, huge, ties of the encoding."""
    rows = np.zeros((12, layout.d_qk), np.float32)
    rows[1, :] = -0.0
    rows[2, [0, 127]] = 448, -3
    rows[3, [1, 130]] = -3, 450
    rows[4, :] = 450 * np.linspace(-1, 1, layout.d_qk)
    rows[5, :] = 1e-30
    rows[6, :] = 3e38
    rows[7, :16] = [
        448,
        17,
        19,
        18,
        240,
        248,
        2**-6,
        7.5 * 2**-9,
        2**-9,
        2**-10,
        3 * 2**-10,
        0.3,
        -17,
        -19,
        -0.0,
        1,
    ]
    rows[8, 64] = -3
    rows[9, [63, 126]] = 1, -1e-3
    rows[10, :4] = [3, -1.5, 0.69921875, 0.00099945068359375]
    rows[11, -1] = 5
    return bf16(rows)


def check_layout(server, rng, layout, raw_scale=1.0):
    heads, s_q, n = 5, 4, 150
    rows = np.concatenate([corner_rows(layout), random_rows(rng, n - 12, layout)])
    quiet = np.arange(12, n)  # the corner rows would drown the rest
    stored, _ = quantize(layout, rows, POW2, raw_scale)
    with server.session() as s:
        first, plain, copied = s.create(), s.create(), s.create()
        for layer in range(2):
            reply = s.append(first, rows[layer:], layer=layer)
            equal((reply.n_tokens, reply.n_nonfinite), (n - layer, 0), "append reply")
        same_bits(s.export(first, layout=layout), stored, layout.name + " stored bytes")
        same_bits(
            s.export(first, layer=1, layout=layout), stored[1:], layout.name + " stored bytes of layer 1"
        )
        same_bits(s.export(first, first=60, n_tokens=10, layout=layout), stored[60:70], "a slice of rows")
        as_bf16 = dequantize(layout, stored, raw_scale)
        same_bits(s.export(first, dtype=pb.DTYPE_BF16, layout=layout), as_bf16, layout.name + " read as bf16")
        if layout.kind == "scaled":
            s.append(plain, rows, rule=pb.WRITE_RULE_PLAIN)
            same_bits(s.export(plain, layout=layout), quantize(layout, rows, PLAIN)[0], "plain rule")
        s.import_rows(copied, stored, layout=layout)
        same_bits(s.export(copied, layout=layout), stored, "imported bytes")
        q, indices = random_q(rng, s_q, heads, layout), quiet[
            random_indices(rng, s_q, 100, n - 12, 0)
        ].astype(np.int32)
        indices[1, ::3] = -1
        indices[2] = -1
        stream = AttendStream(s, layout)
        for sequence in (first, copied):
            result = stream.attend(sequence, q, indices, want_lse=True)
            check_attend(result, *attend_reference(layout, q, as_bf16, indices, 0.05), layout.name)
            f32_result = stream.attend(sequence, q, indices, out=pb.Output(dtype=pb.DTYPE_F32))
            check_attend(f32_result, attend_reference(layout, q, as_bf16, indices, 0.05)[0], None, "f32 out")
        stream.close()


def layout_test(layout, **flags):
    @test(layout=layout.name, layers=2, **flags)
    def run(server, rng):
        equal(server.capabilities.pools[0].row_bytes, layout.row_bytes, "row_bytes")
        check_layout(server, rng, layout, float(flags.get("raw-scale", 1.0)))
        with server.session() as s:
            sequence = s.create()
            for other in LAYOUTS:
                if other is not layout:
                    expect_refusal(
                        lambda: s.import_rows(
                            sequence, np.zeros((1, other.row_bytes), np.uint8), layout=other
                        ),
                        "BAD_LAYOUT",
                        "layout",
                        other.name,
                    )
            expect_refusal(
                lambda: s.call("ImportRows", sequence_id=sequence, layout=99), "BAD_LAYOUT", "layout", 99
            )

    run.__name__ = "layout_" + layout.name + ("_scaled" if flags else "")
    return run


for each in LAYOUTS:
    layout_test(each)
layout_test(LAYOUT["raw_512_64"], **{"raw-scale": "0.25"})


@test()
def nonfinite_input_is_counted_or_refused(server, rng):
    rows = f32(random_rows(rng, 70)).reshape(70, -1).copy()
    rows[3, 5], rows[3, 200], rows[69, 0] = np.nan, np.inf, -np.inf
    bits = bf16(rows)
    stored, n_bad = quantize(MAIN, bits)
    equal(n_bad, 3, "the reference counts")
    with server.session() as s:
        sequence = s.create()
        expect_refusal(lambda: s.append(sequence, bits, strict=True), "NONFINITE")
        equal(s.get(sequence).n_tokens, 0, "tokens after a refused append")
        equal(server.control.pool().n_pages_used, 0, "pages after a refused append")
        reply = s.append(sequence, bits)
        equal(reply.n_nonfinite, 3, "n_nonfinite")
        same_bits(s.export(sequence), stored, "NaN as 0, Inf as 448")
        truth(np.isfinite(f32(s.export(sequence, dtype=pb.DTYPE_BF16))).all(), "what was stored is finite")
        expect_refusal(lambda: s.stream.append(sequence, bits, strict=True), "NONFINITE")
        equal(s.stream.append(sequence, bits).n_nonfinite, 3, "n_nonfinite on a stream")
        equal(s.get(sequence).n_tokens, 140, "tokens")
    truth(server.control.stats().n_nonfinite >= 6, "the counter in Stats")


# ---- support rules ----


@test()
def rules_refuse_by_name(server, rng):
    names = {r.name for r in server.capabilities.rules}
    with server.session() as s:
        sequence = s.create()
        s.append(sequence, random_rows(rng, 4))
        indices = np.zeros((1, 2), np.int32)

        def refused(q, reason="UNSUPPORTED", **fields):
            status = expect_refusal(lambda: s.attend(sequence, q, indices, **fields), reason)
            if reason == "UNSUPPORTED":
                truth(status.rule in names, "rule %r is not in the table" % status.rule)
            return status

        refused(random_q(rng, 1, 129))
        refused(pb.Tensor(dtype=pb.DTYPE_BF16, shape=[1, 2, 512], inline=bytes(2048)))
        refused(pb.Tensor(dtype=pb.DTYPE_F32, shape=[1, 2, 576], inline=bytes(4608)))
        equal(refused(random_q(rng, 1, 2), context_parallel=2).rule, "cpu_no_context_parallel", "rule")
        expect_refusal(
            lambda: s.attend(sequence, random_q(rng, 1, 2), indices, phase="train"),
            "BAD_REQUEST",
            "attend.phase",
            "train",
        )
        for phase in ("", "prefill", "decode"):
            s.attend(sequence, random_q(rng, 1, 2), indices, phase=phase, context_parallel=1)


@test(own=True)
def start_up_refuses_what_no_rule_serves(env, rng):
    for flags, words in (
        ({"layout": "scaled_512_0", "decode-layout": "bf16_512"}, ("pool_layout_agrees", "scaled_512_0")),
        ({"device": "hip", "context-parallel": "2"}, ("hip_no_context_parallel", "2")),
        ({"context-parallel": "2"}, ("cpu_no_context_parallel", "2")),
        ({"layout": "scaled_999"}, ("layout", "scaled_999")),
        ({"layout": ""}, ("layout",)),
        ({"no-such-flag": "1"}, ("no-such-flag",)),
        ({"max-rows": "x"}, ("max-rows", "x")),
        ({"write-rule": "odd"}, ("write-rule", "odd")),
        ({"host-tier": "disk"}, ("host-tier", "disk")),
    ):
        server = Server(env, **flags)
        code = server.wait_exit(5 * SLOW)
        truth(code in (1, 2), "exit code %d with %r" % (code, flags))
        for word in words:
            truth(word in server.text(), "%r says %r, without %r" % (flags, server.text(), word))
        truth(not os.path.exists(server.path), "no socket is left by a refused start")


@test(**{"host-tier": "none"})
def without_shared_memory(server, rng):
    with server.session() as s:
        expect_refusal(lambda: s.region(4096), "UNSUPPORTED", "memfd")


# ---- regions ----


@test()
def tensors_in_regions(server, rng):
    """Everything by handle, results included: the same bits as inline."""
    with server.session() as s:
        region = s.region(1 << 20)
        equal((region.reply.size, region.reply.state), (1 << 20, pb.REGION_STATE_ACTIVE), "Region")
        stats = server.control.stats()
        equal((stats.n_regions, stats.region_bytes), (1, 1 << 20), "regions in Stats")
        sequence, twin = s.create(), s.create()
        rows, q, indices = random_rows(rng, 150), random_q(rng, 3, 5), random_indices(rng, 3, 70, 150)
        lengths, sink = np.array([70, 33, 0], np.int32), rng.standard_normal(5).astype(np.float32)
        s.append(sequence, region.put(rows))
        s.append(twin, rows)
        same_bits(s.export(sequence), s.export(twin), "rows appended by handle")
        at = {"q": 0x40000, "indices": 0x50000, "lengths": 0x60000, "sink": 0x60100}
        inputs = {
            k: region.put(v, at[k])
            for k, v in (("q", q), ("indices", indices), ("lengths", lengths), ("sink", sink))
        }
        for dtype, width in ((pb.DTYPE_BF16, 2), (pb.DTYPE_F32, 4)):
            plain = s.attend(
                twin, q, indices, lengths=lengths, sink=sink, want_lse=True, out=pb.Output(dtype=dtype)
            )
            region.bytes[0x80000:] = 0xEE
            result = s.attend(
                [(sequence, 3)],
                inputs["q"],
                inputs["indices"],
                lengths=inputs["lengths"],
                sink=inputs["sink"],
                want_lse=True,
                out=pb.Output(dtype=dtype, region=region.slice(0x80000)),
                lse=pb.Output(region=region.slice(0xC0000)),
            )
            truth(result.out is None and result.lse is None, "results in a region are not sent as well")
            n = 3 * 5 * 512 * width
            same_bits(
                region.view(plain.out_bits.dtype, plain.out_bits.shape, 0x80000),
                plain.out_bits,
                "out in a region",
            )
            same_bits(region.view(np.float32, (3, 5), 0xC0000), plain.lse, "lse in a region")
            truth(
                (region.bytes[0x80000 + n : 0xC0000] == 0xEE).all()
                and (region.bytes[0xC0000 + 60 :] == 0xEE).all(),
                "bytes after the results were touched",
            )
        equal(region.unregister(), pb.REGION_STATE_GONE, "unregister when idle")
        expect_refusal(lambda: s.append(sequence, region.put(rows)), "NOT_FOUND")
        expect_refusal(region.unregister, "NOT_FOUND")


@test()
def strides(server, rng):
    """Honoured or refused, never ignored."""
    with server.session() as s:
        region = s.region(2 << 20)
        sequence = s.create()
        rows = random_rows(rng, 60)
        s.append(sequence, rows)
        q, indices = random_q(rng, 4, 3), random_indices(rng, 4, 33, 60)
        dense = s.attend(sequence, q, indices, want_lse=True)
        region.bytes[:] = 0x7F
        variants = {
            "padded heads": (0, (3 * 1200, 1200, 2)),
            "heads and tokens swapped": (0, (1152, 4 * 1152, 2)),
            "offset of one element": (2, (3456, 1152, 2)),
            "padded rows": (64, (5000, 1152, 2)),
        }
        for name, (offset, steps) in variants.items():
            region.bytes[: 1 << 20] = 0x7F
            result = s.attend([(sequence, 4)], region.put(q, offset, steps), indices, want_lse=True)
            same_bits(result.out_bits, dense.out_bits, "q with " + name)
        index_steps = (40 * 4, 4)
        same_bits(
            s.attend(sequence, q, region.put(indices, 512 << 10, index_steps)).out_bits,
            dense.out_bits,
            "indices with padded rows",
        )
        twin = s.create()
        s.append(twin, region.put(rows, 600 << 10, (1300, 2)))
        same_bits(s.export(twin), s.export(sequence), "rows with padded pitch")
        for name, steps in (
            ("padded heads", (3 * 1100, 1100, 2)),
            ("padded rows", (4000, 1024, 2)),
            ("heads and tokens swapped", (1024, 4 * 1024, 2)),
        ):
            base = 1 << 20
            region.bytes[base:] = 0x7F
            out = pb.Output(region=region.slice(base), strides_bytes=steps)
            try:
                s.attend(sequence, q, indices, out=out)
            except Refused as refused:
                truth(name.startswith("heads"), "padded outputs are served, but: %s" % refused)
                truth("strides" in refused.status.field, "refused, but not by the strides: %s" % refused)
                continue
            view = np.lib.stride_tricks.as_strided(
                region.bytes[base : base + 2].view(np.uint16), (4, 3, 512), steps
            )
            same_bits(np.array(view), dense.out_bits, "out with " + name)
            touched = np.zeros(len(region.bytes) - base, bool)
            np.lib.stride_tricks.as_strided(touched, (4, 3, 1024), (*steps[:2], 1))[...] = True
            truth((region.bytes[base:][~touched] == 0x7F).all(), "gap bytes of out with %s changed" % name)
        lse = pb.Output(region=region.slice(1 << 20), strides_bytes=(64, 4))
        region.bytes[1 << 20 :] = 0x7F
        s.attend(sequence, q, indices, want_lse=True, lse=lse)
        got = np.lib.stride_tricks.as_strided(
            region.bytes[1 << 20 : (1 << 20) + 4].view(np.float32), (4, 3), (64, 4)
        )
        same_bits(np.array(got), dense.lse, "lse with padded rows")

        def refuse_q(steps):
            tensor = pb.Tensor(
                dtype=pb.DTYPE_BF16, shape=[4, 3, 576], strides_bytes=steps, region=region.slice()
            )
            status = expect_refusal(
                lambda: s.attend([(sequence, 4)], tensor, indices), ("BAD_SHAPE", "BAD_RANGE", "BAD_REQUEST")
            )
            truth(
                status.field.startswith(("attend.q.strides_bytes", "attend.q.shape")),
                "field %r for %r" % (status.field, steps),
            )

        for steps in (
            (3456, 1152, 4),
            (3456, 1152, 0),
            (3456, 1152, -2),
            (-3456, 1152, 2),
            (3456, -1152, 2),
            (0, 1152, 2),
            (3456, 0, 2),
            (3456, 1150, 2),
            (1152, 1152, 2),
            (3454, 1152, 2),
            (3456, 1152),
            (3456, 1152, 2, 2),
            (3457, 1152, 2),
            (2**63 - 2, 1152, 2),
            (-(2**63), 1152, 2),
        ):
            refuse_q(steps)
        for steps in (
            (3072, 1000, 2),
            (1024, 1024, 2),
            (0, 1024, 2),
            (-3072, 1024, 2),
            (3072, 1024, 4),
            (3000, 1024, 2),
        ):
            out = pb.Output(region=region.slice(), strides_bytes=steps)
            status = expect_refusal(
                lambda: s.attend(sequence, q, indices, out=out), ("BAD_SHAPE", "BAD_RANGE", "BAD_REQUEST")
            )
            truth(
                status.field.startswith("attend.out.strides_bytes"),
                "field %r for out %r" % (status.field, steps),
            )
        tensor = inline(q)
        tensor.strides_bytes.extend([3456, 1152, 2])
        expect_refusal(
            lambda: s.attend([(sequence, 4)], tensor, indices), "BAD_SHAPE", "attend.q.strides_bytes"
        )


@test(**{"pool-pages": 2048})
def tensor_of_64_mib_by_handle(server, rng):
    """A 64 MiB tensor travels as a handle; 8 MiB inline are refused, and both sides keep working."""
    rows_n = scaled(58254, 14563)  # 58254 * 1152 bytes = 64 MiB
    with server.session() as s:
        rows = np.tile(random_rows(rng, 1024), (rows_n // 1024 + 1, 1))[:rows_n]
        region = s.region(64 << 20 if not SANITIZED else 17 << 20)
        sequence = s.create()
        equal(s.append(sequence, region.put(rows)).n_tokens, rows_n, "tokens of a 64 MiB append")
        equal(s.get(sequence).n_pages, -(-rows_n // 64), "pages")
        stored = quantize(MAIN, rows[:1024])[0]
        at = rows_n - rows_n % 1024 - 1024
        same_bits(s.export(sequence, first=at, n_tokens=1024), stored, "rows near the end")
        q = random_q(rng, 2, 4)
        indices = np.full((2, 2048), -1, np.int32)
        indices[:, :] = rng.integers(0, rows_n, (2, 2048))
        kv = np.tile(dequantize(MAIN, stored), (rows_n // 1024 + 1, 1))[:rows_n]
        check_attend(
            s.attend(sequence, q, indices, want_lse=True),
            *attend_reference(MAIN, q, kv, indices, 0.05),
            "big"
        )


@test()
def eight_mib_inline_is_refused(server, rng):
    with server.session() as s:
        sequence = s.create()
        rows = random_rows(rng, 128)
        limit = server.capabilities.limits.max_inline_bytes
        equal(limit, 4 << 20, "max_inline_bytes")
        fits = limit // 1152
        big = np.tile(rows, (fits // 128 + 2, 1))
        expect_refusal(
            lambda: s.append(sequence, big[: fits + 1]),
            "TOO_LARGE",
            "append.rows.inline",
            (fits + 1) * 1152,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        )
        expect_refusal(
            lambda: s.stream.append(sequence, big[: fits + 1]),
            "TOO_LARGE",
            "append.rows.inline",
            (fits + 1) * 1152,
        )
        equal(s.append(sequence, big[:fits]).n_tokens, fits, "the largest inline tensor")
        s.truncate(sequence, 0)
        over = np.tile(rows, ((8 << 20) // rows.nbytes + 1, 1))
        truth(over.nbytes > 8 << 20, "more than one message holds")
        try:
            s.append(sequence, over)
            fail("a message above max_message_bytes was taken")
        except grpc.RpcError as error:
            equal(error.code(), grpc.StatusCode.RESOURCE_EXHAUSTED, "a message above the limit")
            truth(str(8 << 20) in error.details(), "details %r" % error.details())
        equal(s.append(sequence, rows).n_tokens, 128, "the connection is still usable")
        equal(s.stream.append(sequence, rows).n_tokens, 256, "the stream is still usable")


@test()
def large_messages_on_a_stream(server, rng):
    """Above max_message_bytes: refused by name, the stream goes on. Far above, gRPC itself ends that stream alone."""
    with server.session() as s:
        sequence = s.create()
        limit = server.capabilities.limits.max_message_bytes
        above = np.zeros((limit // 1152 + 2, 576), np.uint16)
        stream = AttendStream(s)
        stream.wait_until_read()
        expect_refusal(
            lambda: stream.append(sequence, above),
            "TOO_LARGE",
            "message",
            code=grpc.StatusCode.RESOURCE_EXHAUSTED,
        )
        equal(stream.append(sequence, random_rows(rng, 3)).n_tokens, 3, "the same stream goes on")
        stream.append(sequence, np.tile(above, (8, 1)), wait=False)
        try:
            equal(stream.bidi.recv(), None, "an answer to a message far above the limit")
            fail("the stream ended as if nothing was wrong")
        except grpc.RpcError as error:
            equal(error.code(), grpc.StatusCode.RESOURCE_EXHAUSTED, "code")
        equal(
            s.stream.append(sequence, random_rows(rng, 3)).n_tokens,
            6,
            "another stream of the session goes on",
        )


@test(layers=2)
def export_is_chunked(server, rng):
    with server.session() as s:
        sequence = s.create()
        rows = np.tile(random_rows(rng, 500), (10, 1))
        for begin in range(0, 5000, 2500):
            s.append(sequence, rows[begin : begin + 2500])
        request = pb.ExportRowsRequest(session=s.token, sequence_id=sequence)
        chunks = list(s.client.export(request))
        truth(len(chunks) > 1, "5000 rows in one message")
        truth(
            max(len(c.rows) for c in chunks) <= server.capabilities.limits.max_message_bytes // 2,
            "a chunk too large",
        )
        same_bits(s.export(sequence), quantize(MAIN, rows)[0], "5000 rows")
        equal(len(s.export(sequence, first=4999)), 1, "the last row")
        for first, n, value in (
            (5001, 0, 5001),
            (5000, 1, None),
            (0, 5001, None),
            (2**64 - 1, 2, None),
            (1, 2**64 - 1, None),
        ):
            expect_refusal(lambda: s.export(sequence, first=first, n_tokens=n), "BAD_RANGE", value=value)
        expect_refusal(lambda: s.export(sequence, layer=2), "BAD_RANGE", "layer", 2)
        expect_refusal(lambda: s.export(sequence, dtype=pb.DTYPE_I32), "BAD_REQUEST", "dtype", pb.DTYPE_I32)


# ---- limits at the door ----


@test(
    **{
        "max-rows": 8,
        "max-segments": 3,
        "max-topk": 100,
        "max-append-rows": 32,
        "max-sessions": 2,
        "max-regions": 3,
        "max-sequences": 4,
        "max-region-bytes": "1MiB",
        "layers": 2,
    }
)
def every_limit_holds(server, rng):
    with server.session() as s:
        sequence = s.create()
        s.append(sequence, inline(np.stack([random_rows(rng, 16), random_rows(rng, 16)])), n_layers=2)
        expect_refusal(lambda: s.append(sequence, random_rows(rng, 33)), "TOO_LARGE", "append.rows", 33)
        expect_refusal(
            lambda: s.append(sequence, inline(np.zeros((2, 17, 576), np.uint16)), n_layers=2),
            "TOO_LARGE",
            "append.rows",
        )
        q8, i8 = random_q(rng, 8, 2), random_indices(rng, 8, 10, 32)
        s.attend(sequence, q8, i8)
        expect_refusal(
            lambda: s.attend(sequence, random_q(rng, 9, 2), random_indices(rng, 9, 10, 32)),
            "TOO_LARGE",
            "attend.segments",
            9,
        )
        for count in (2**32 - 1, 2**31):
            expect_refusal(
                lambda: s.attend([(sequence, count), (sequence, 2)], q8, i8), "TOO_LARGE", "attend.segments"
            )
        expect_refusal(lambda: s.attend([(sequence, 2)] * 4, q8, i8), "TOO_LARGE", "attend.segments", 4)
        expect_refusal(
            lambda: s.attend(sequence, q8, random_indices(rng, 8, 101, 32)),
            "TOO_LARGE",
            "attend.indices.shape[1]",
            101,
        )
        for _ in range(3):
            s.create()
        expect_refusal(s.create, "LIMIT", code=grpc.StatusCode.RESOURCE_EXHAUSTED)
        expect_refusal(lambda: s.fork(sequence, 1), "LIMIT")
        regions = [s.region(4096) for _ in range(3)]
        expect_refusal(lambda: s.region(4096), "LIMIT")
        regions[0].unregister()
        expect_refusal(lambda: s.region((1 << 20) + 1), "TOO_LARGE", "size", (1 << 20) + 1)
        s.region(1 << 20)
        with server.session():
            client = server.client()
            lease = client.bidi("OpenSession")
            lease.send(pb.SessionRequest(open=pb.SessionOpen(client_name="third")))
            expect_refusal(lease.recv, "LIMIT", code=grpc.StatusCode.RESOURCE_EXHAUSTED)
    with server.session(), server.session():
        equal(server.control.stats().n_sessions, 2, "two sessions fit again")


@test()
def deadlines_and_cancels(server, rng):
    """Past its deadline or cancelled: one answer each, and the sequence goes on."""
    with server.session() as s:
        sequence = s.create()
        s.append(sequence, random_rows(rng, 256))
        q, indices = random_q(rng, 256, 64), random_indices(rng, 256, 1024, 256)
        region = s.region(64 << 20)
        tensors = region.put(q), region.put(indices, 32 << 20)
        out = pb.Output(region=region.slice(40 << 20))
        blocker = s.attend([(sequence, 256)], *tensors, out=out, wait=False)
        late = s.attend(sequence, q[:1], indices[:1], deadline_us=1, wait=False)
        dropped = s.attend(sequence, q[:1], indices[:1], wait=False, priority=-100)
        s.stream.cancel_request(dropped)
        s.stream.cancel_request(123456789)  # unknown: ignored
        expect_refusal(lambda: s.stream.wait(late), "DEADLINE", code=grpc.StatusCode.DEADLINE_EXCEEDED)
        try:
            s.stream.wait(dropped)
        except Refused as refused:
            equal(refused.status.reason, "CANCELLED", "a cancelled request")
        s.stream.wait(blocker)
        s.attend(sequence, q[:1], indices[:1], deadline_us=60000000)
        s.attend(sequence, q[:1], indices[:1], deadline_us=2**64 - 1)


@test()
def request_ids_and_envelopes(server, rng):
    with server.session() as s:
        sequence = s.create()
        s.append(sequence, random_rows(rng, 64))
        q, indices = random_q(rng, 1, 2), random_indices(rng, 1, 16, 64)
        op = attend_op(sequence, q, indices)
        stream = s.stream
        for fields, reason, field in (
            ({"request_id": 0, "attend": op}, "BAD_REQUEST", "request_id"),
            ({"request_id": 5}, "BAD_REQUEST", "op"),
            ({"request_id": 5, "attend": op, "priority": 101}, "BAD_RANGE", "priority"),
            ({"request_id": 5, "attend": op, "priority": -(2**31)}, "BAD_RANGE", "priority"),
        ):
            stream.send(**fields)
            expect_refusal(lambda: stream.wait(fields["request_id"]), reason, field)
        stream.send(request_id=6, token=b"0123456789abcdef", attend=op)
        expect_refusal(lambda: stream.wait(6), "FAILED_PRECONDITION", "session")
        stream.send(request_id=7, attend=op)
        stream.shapes[7] = (2, False)
        truth(stream.wait(7).out is not None, "the stream goes on after bad requests")
        stream.send(request_id=7, token=s.token, attend=op)
        stream.shapes[7] = (2, False)
        truth(stream.wait(7).out is not None, "an id can be used again, and the token may be repeated")
        fresh = AttendStream(s)
        fresh.is_first = False  # no token
        fresh.send(attend=op)
        expect_refusal(lambda: fresh.wait(1), "NO_SESSION", code=grpc.StatusCode.UNAUTHENTICATED)
        fresh.send(request_id=2, token=s.token, attend=op)
        fresh.shapes[2] = (2, False)
        truth(fresh.wait(2).out is not None, "the token may come later")
        fresh.close()


@test()
def device_memory_is_unimplemented_here(server, rng):
    with server.session() as s:
        for fields in (
            {"device_fd": pb.DeviceFdRegion(fd_ticket=1, device_uuid="GPU-1")},
            {"device_ipc": pb.DeviceIpcRegion(handle=b"x" * 64, device_uuid="GPU-1")},
        ):
            status = expect_refusal(
                lambda: s.call("RegisterRegion", access=1, size=4096, **fields),
                "UNIMPLEMENTED",
                next(iter(fields)),
                code=grpc.StatusCode.UNIMPLEMENTED,
            )
            truth("GPU" in status.message, "message %r" % status.message)


@test(**{"tcp": "127.0.0.1:0"})
def tcp_serves_the_same(server, rng):
    port = int(re.search(r"tcp port=(\d+)", server.text()).group(1))
    client = Client("127.0.0.1:%d" % port)
    with Session(client) as s:
        sequence = s.create()
        s.append(sequence, random_rows(rng, 70))
        kv = s.export(sequence, dtype=pb.DTYPE_BF16)
        q, indices = random_q(rng, 2, 4), random_indices(rng, 2, 16, 70)
        check_attend(
            s.attend(sequence, q, indices, want_lse=True),
            *attend_reference(MAIN, q, kv, indices, 0.05),
            "tcp"
        )
        expect_refusal(lambda: client.call("Drain"), "ACCESS_DENIED", code=grpc.StatusCode.PERMISSION_DENIED)
    client.close()


if __name__ == "__main__":
    main()
