#!/usr/bin/python3
"""test_lifetime.py - who owns what, and for how long: killed clients, leases, regions in use, cancelled calls."""

from busy import *  # noqa: F403
import victim

# ---- killed clients ----


@test()
def killed_clients_leave_nothing(server, rng):
    """SIGKILL at many points: everything is back in the pool within a second."""
    modes = [m for m in victim.MODES] * (1 if SANITIZED else 2)
    for number, mode in enumerate(modes):
        process = subprocess.Popen(
            [sys.executable, os.path.join(HERE, "victim.py"), server.path, mode, str(number)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            equal(process.stdout.readline(), b"ready\n", "what the victim in mode %s says" % mode)
            truth(server.control.stats().n_sessions >= 1, "the victim has a session")
            if number >= len(victim.MODES):  # somewhere in its loop, not at its start
                deadline = time.monotonic() + float(rng.random()) * 0.05
                wait_until(lambda: time.monotonic() > deadline, 1, "a random moment")
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        try:
            server.expect_empty()
        except Failure as failed:
            fail("killed in mode %s: %s" % (mode, failed))
    truth(server.control.stats().n_sessions_reclaimed >= len(modes), "n_sessions_reclaimed counts them")


@test()
def closing_frees_all_at_once(server, rng):
    """Half-close, cancel of the lease stream and a dropped connection, each with all kinds of belongings."""
    for way in ("half_close", "cancel", "drop"):
        client = server.client()
        s = Session(client)
        victim.do_sequences(s, rng)
        victim.do_regions(s, rng)
        victim.do_tickets(s, rng)
        request = s.attend(s.create(), random_q(rng, 1, 1), np.zeros((1, 1), np.int32), wait=False)
        del request
        if way == "half_close":
            s.lease.half_close()
            equal(s.lease.recv(), None, "the lease ends cleanly")
        elif way == "cancel":
            s.lease.cancel()
        else:
            client.close()
        server.expect_empty()
        expect_refusal(
            lambda: server.control.call("CreateSequence", session=s.token), "NO_SESSION", "session"
        )
        s.abandon()
        client.close()


# ---- leases ----


@test()
def lease_runs_out(server, rng):
    client = server.client()
    s = Session(client, lease_us=200000)
    sequence = s.create()
    s.append(sequence, random_rows(rng, 100))
    s.region(4096)
    end = time.monotonic() + 1.0  # five leases
    n = 0
    while time.monotonic() < end:
        s.lease.send(pb.SessionRequest(heartbeat=pb.SessionHeartbeat(seq=n)))
        equal(s.lease.recv().heartbeat.seq, n, "echo")
        n += 1
        time.sleep(0.02)  # the client's own beat, not a wait for the server
    equal(s.get(sequence).n_tokens, 100, "kept alive by heartbeats")
    event = s.lease.recv(timeout=5 * SLOW)  # no more beats
    equal(event.WhichOneof("kind"), "closing", "the server's last message")
    equal(event.closing.status.reason, "SESSION_EXPIRED", "why")
    try:
        equal(s.lease.recv(), None, "after closing")
    except grpc.RpcError as error:
        equal(refused_from(error).status.reason, "SESSION_EXPIRED", "status of the stream")
    server.expect_empty()
    expect_refusal(lambda: s.get(sequence), ("NO_SESSION", "SESSION_EXPIRED"))
    client.close()


@test()
def grace_and_reattach(server, rng):
    client = server.client()
    s = Session(client, grace_us=30000000)
    sequence = s.create()
    rows = random_rows(rng, 100)
    s.append(sequence, rows)
    region = s.region(4096)
    expect_refusal(lambda: Session(client, token=s.token), "FAILED_PRECONDITION")  # its stream is still there
    s.lease.cancel()

    def try_reattach():  # the server sees the cancel in its own time, and refuses until then
        try:
            return Session(client, token=s.token)
        except grpc.RpcError as error:
            equal(refused_from(error).status.reason, "FAILED_PRECONDITION", "too early")
            return None

    again = wait_until(try_reattach, 5 * SLOW, "reattached")
    truth(again.opened.reattached, "reattached")
    equal(again.token, s.token, "the token stays")
    equal(again.opened.grace_us, 30000000, "grace")
    same_bits(again.export(sequence), quantize(MAIN, rows)[0], "rows after a reattach")
    equal(server.control.stats().n_regions, 1, "regions after a reattach")
    again.call("UnregisterRegion", region_id=region.id)
    again.close()
    server.expect_empty()
    expect_refusal(lambda: Session(client, token=s.token), "NO_SESSION")
    expect_refusal(lambda: Session(client, token=b"short"), "NO_SESSION")
    short = Session(client, grace_us=100000)
    victim.do_sequences(short, rng)
    short.lease.cancel()
    wait_until(server.is_empty, 5 * SLOW, "grace is over and all is given back")
    expect_refusal(lambda: Session(client, token=short.token), "NO_SESSION")
    closed = Session(client, grace_us=30000000)
    victim.do_sequences(closed, rng)
    closed.close()  # a half-close ends it at once, whatever the grace
    server.expect_empty()
    client.close()


# ---- handles ----


@test()
def region_unregistered_in_use(server, rng):
    """IPC-01: PENDING while a request uses it, refused to new ones at once, gone when the request is done."""
    with server.session(name="loops") as s:
        blocker = Blocker(server, rng, 1.0, s)
        request = blocker.start_and_see()
        equal(blocker.region.unregister(), pb.REGION_STATE_PENDING, "unregister while used")
        late = s.attend(
            [(blocker.sequence, 1)],
            pb.Tensor(dtype=pb.DTYPE_BF16, shape=[1, 1, 576], region=blocker.region.slice()),
            np.zeros((1, 1), np.int32),
            wait=False,
        )
        expect_refusal(lambda: s.stream.wait(late), "NOT_FOUND")
        expect_refusal(blocker.region.unregister, "NOT_FOUND")
        s.stream.wait(request)
        blocker.check()
        wait_until(lambda: server.control.stats().n_regions == 0, 2 * SLOW, "the region is gone")
        before = server.n_maps(), server.n_fds()
        sequence = s.create()
        s.append(sequence, random_rows(rng, 64))
        q, indices = random_q(rng, 2, 4), random_indices(rng, 2, 32, 64)
        expected = s.attend(sequence, q, indices).out_bits
        for _ in range(full(10000, 200)):
            region = s.region(32768)
            request = s.attend(
                [(sequence, 2)],
                region.put(q),
                region.put(indices, 16384),
                wait=False,
                out=pb.Output(region=region.slice(20480)),
            )
            state = region.unregister()
            truth(state in (pb.REGION_STATE_PENDING, pb.REGION_STATE_GONE), "state %d" % state)
            try:
                s.stream.wait(request)
            except Refused as refused:  # unary and stream are not ordered: the unregister may have come first
                equal(refused.status.reason, "NOT_FOUND", "a request that came after its region went")
                continue
            same_bits(region.view(np.uint16, expected.shape, 20480), expected, "written into the old mapping")
        wait_until(lambda: server.control.stats().n_regions == 0, 2 * SLOW, "all regions gone")
        wait_until(
            lambda: server.n_maps() <= before[0] + 16 and server.n_fds() <= before[1] + 2,
            2 * SLOW,
            "maps and fds as before (%r, now %d %d)" % (before, server.n_maps(), server.n_fds()),
        )


@test()
def register_and_unregister_is_flat(server, rng):
    with server.session() as s:
        n = scaled(3000)
        begin = None
        for i in range(n + n // 3):
            if i == n // 3:  # warm
                begin = server.n_maps(), server.n_fds(), server.rss()
            region = s.region(4096 * (1 + i % 5))
            equal(region.unregister(), pb.REGION_STATE_GONE, "idle region")
        equal(server.control.stats().n_regions, 0, "regions")
        end = server.n_maps(), server.n_fds(), server.rss()
        truth(end[1] <= begin[1] + 1, "descriptors %d, before %d" % (end[1], begin[1]))
        truth(end[0] <= begin[0] + 16, "mappings %d, before %d" % (end[0], begin[0]))
        if not SANITIZED:
            truth(end[2] <= begin[2] * 1.05 + (2 << 20), "RSS %d, before %d" % (end[2], begin[2]))


@test()
def double_release(server, rng):
    """POOL-01: the second release is NOT_FOUND, whoever comes second; no page is handed out twice."""
    with server.session() as s:
        clients = [server.client() for _ in range(4)]
        for _ in range(scaled(50, 10)):
            a = s.create()
            s.append(a, random_rows(rng, 130))
            request = pb.ReleaseSequenceRequest(session=s.token, sequence_id=a)
            results = []

            def release(client):
                try:
                    client.call("ReleaseSequence", request)
                    results.append("ok")
                except grpc.RpcError as error:
                    results.append(refused_from(error).status.reason)

            threads = [threading.Thread(target=release, args=(c,)) for c in clients]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            equal(sorted(results), ["NOT_FOUND"] * 3 + ["ok"], "four releases")
            pool = server.control.pool()
            equal((pool.n_pages_used, pool.n_pages_free), (0, pool.n_pages), "pages")
            for stale in (
                lambda: s.get(a),
                lambda: s.append(a, random_rows(rng, 1)),
                lambda: s.fork(a),
                lambda: s.stream.append(a, random_rows(rng, 1)),
                lambda: s.export(a),
                lambda: s.attend(a, random_q(rng, 1, 1), np.zeros((1, 1), np.int32)),
            ):
                expect_refusal(stale, "NOT_FOUND")
        b, c = s.create(), s.create()
        truth(a not in (b, c), "ids are never reused")
        rows_b, rows_c = random_rows(rng, 200), random_rows(rng, 200)
        for begin in range(0, 200, 40):
            s.append(b, rows_b[begin : begin + 40])
            s.append(c, rows_c[begin : begin + 40])
        same_bits(s.export(b), quantize(MAIN, rows_b)[0], "B")
        same_bits(s.export(c), quantize(MAIN, rows_c)[0], "C")
        for client in clients:
            client.close()


@test()
def foreign_and_stale_handles(server, rng):
    with server.session() as mine, server.session() as other:
        region, sequence = mine.region(1 << 16), mine.create()
        mine.append(sequence, random_rows(rng, 64))
        expect_refusal(
            lambda: other.append(sequence, random_rows(rng, 1)), "NOT_FOUND", "append.sequence_id", sequence
        )
        expect_refusal(
            lambda: other.stream.append(sequence, random_rows(rng, 1)),
            "NOT_FOUND",
            "append.sequence_id",
            sequence,
        )
        for call in (
            lambda: other.get(sequence),
            lambda: other.fork(sequence),
            lambda: other.truncate(sequence, 0),
            lambda: other.release(sequence),
            lambda: other.export(sequence),
            lambda: other.import_rows(sequence, np.zeros((1, 656), np.uint8)),
        ):
            expect_refusal(call, "NOT_FOUND", "sequence_id", sequence)
        q, indices = random_q(rng, 1, 2), np.zeros((1, 4), np.int32)
        expect_refusal(
            lambda: other.attend(sequence, q, indices),
            "NOT_FOUND",
            "attend.segments[0].sequence_id",
            sequence,
        )
        own = other.create()
        other.append(own, random_rows(rng, 64))
        for region_id in (
            region.id,
            b"",
            b"x" * 15,
            b"x" * 16,
            b"x" * 17,
            region.id[:15],
            region.id + b"\0",
            bytes([region.id[0] ^ 1]) + region.id[1:],
        ):
            tensor = pb.Tensor(
                dtype=pb.DTYPE_BF16, shape=[1, 2, 576], region=pb.RegionSlice(region_id=region_id)
            )
            status = expect_refusal(lambda: other.attend([(own, 1)], tensor, indices), "NOT_FOUND")
            truth(status.field.startswith("attend.q.region"), "field %r" % status.field)
            expect_refusal(
                lambda: other.call("UnregisterRegion", region_id=region_id), "NOT_FOUND", "region_id"
            )
        region.unregister()
        expect_refusal(lambda: mine.attend([(sequence, 1)], region.put(q), indices), "NOT_FOUND")
    expect_refusal(lambda: mine.get(sequence), "NO_SESSION", "session")
    stream = AttendStream(mine)
    stream.attend(sequence, q, indices, wait=False)
    expect_refusal(lambda: stream.wait(1), "NO_SESSION")
    stream.close()


@test()
def tickets(server, rng):
    """Descriptors: used up by a registration, closed with the session, bounded, and refused by name."""
    with server.session() as s:
        before = server.n_fds()
        fd = victim.memfd()
        ticket = s.offer(fd)

        def register(ticket):
            return s.call("RegisterRegion", memfd=pb.MemfdRegion(fd_ticket=ticket), access=1, size=4096)

        register(ticket)
        expect_refusal(lambda: register(ticket), "BAD_FD", "memfd.fd_ticket", ticket)
        expect_refusal(lambda: register(99999), "BAD_FD", "memfd.fd_ticket", 99999)
        fds = s.fd_socket()
        ticket = s.offer(fd)
        equal(fds.offer(s.token, ticket, [fd])[1] < 0, True, "a ticket number twice")
        for arguments, keywords in (
            ((s.token, 0, [fd]), {}),
            ((b"x" * 16, 5, [fd]), {}),
            ((s.token, 5, []), {}),
            ((s.token, 5, [fd, fd]), {}),
            ((s.token, 5, [fd] * 8), {}),
            ((s.token, 5, [fd] * 100), {}),
            ((s.token, 5, [fd]), {"magic": 1}),
            ((s.token, 5, [fd]), {"version": 2}),
        ):
            number, status, text = fds.offer(*arguments, **keywords)
            truth(status < 0 and text, "offer %r %r answered %d %r" % (arguments, keywords, status, text))
        n_offered = 0
        while True:
            answer = fds.offer(s.token, 1000 + n_offered, [fd])
            if answer[1] != 0:
                break
            n_offered += 1
            truth(n_offered <= 1000, "descriptors of one session are not bounded")
        truth(answer[2], "the refusal says why")
        os.close(fd)
    server.expect_empty()
    wait_until(
        lambda: server.n_fds() <= before + 1, 2 * SLOW, "unclaimed descriptors are closed with the session"
    )


# ---- the pool against a model ----


def random_operations(server, rng, layers):
    with server.session() as s:
        model = {}  # id -> rows of each layer
        refused = 0

        def attempt(call):
            nonlocal refused
            try:
                return call()
            except grpc.RpcError as error:
                equal(refused_from(error).status.reason, "NO_PAGES", "a refusal")
                refused += 1
                return None

        def step():
            action = rng.choice(["create", "fork", "append", "append", "append", "truncate", "release"])
            if action == "create" or not model:
                if len(model) < 12:
                    model[s.create()] = [np.zeros((0, 576), np.uint16)] * layers
                return
            which = int(rng.choice(list(model)))
            planes = model[which]
            common = min(len(p) for p in planes)
            if action == "fork" and common:
                n = int(rng.integers(1, common + 1))
                made = attempt(lambda: s.fork(which, n))
                if made:
                    model[made.id] = [p[:n] for p in planes]
            elif action == "append":
                begin = int(rng.integers(0, layers))
                n_layers = int(rng.integers(1, layers - begin + 1))
                if len({len(p) for p in planes[begin : begin + n_layers]}) > 1:
                    n_layers = 1  # layers that are appended to together have one length
                n = int(rng.integers(1, 150))
                new = [random_rows(rng, n) for _ in range(n_layers)]
                tensor = inline(np.stack(new)) if n_layers > 1 else inline(new[0])
                if attempt(lambda: s.append(which, tensor, layer=begin, n_layers=n_layers)):
                    for i, rows in enumerate(new):
                        planes[begin + i] = np.concatenate([planes[begin + i], rows])
            elif action == "truncate":
                n = int(rng.integers(0, common + 1))
                s.truncate(which, n)
                model[which] = [p[:n] for p in planes]
            elif action == "release":
                s.release(which)
                del model[which]

        for number in range(scaled(500, 200)):
            step()
            pool = server.control.pool()
            held = sum(-(-max(len(p) for p in planes) // 64) for planes in model.values())
            equal(pool.page_refs, held, "references after step %d" % number)
            equal(pool.n_pages_used + pool.n_pages_free, pool.n_pages, "used + free after step %d" % number)
            equal(pool.n_sequences, len(model), "sequences after step %d" % number)
            truth(pool.n_pages_used <= pool.page_refs, "more pages than references")
            if number % 20 == 0:
                for which, planes in model.items():
                    state = s.get(which)
                    equal(list(state.layer_tokens), [len(p) for p in planes], "tokens after step %d" % number)
                    for layer, rows in enumerate(planes):
                        if len(rows):
                            same_bits(
                                s.export(which, layer=layer),
                                quantize(MAIN, rows)[0],
                                "rows after step %d" % number,
                            )
        truth(refused > 0, "the pool was never full: the test is too tame")


@test(**{"pool-pages": 12})
def random_operations_against_a_model(server, rng):
    """create, fork, append, truncate, release at random: contents, lengths and page references agree at each step."""
    random_operations(server, rng, 1)


@test(**{"pool-pages": 12, "layers": 3})
def random_operations_with_layers(server, rng):
    random_operations(server, rng, 3)


@test()
def mixed_load_leaves_nothing(server, rng):
    """POOL-03: thousands of requests, some cancelled, some refused, some late; then everything is as after warm-up."""

    def load(n, s, stream):
        sequence = s.create()
        s.append(sequence, random_rows(rng, 128))
        counts = {}
        pending = {}
        for i in range(n):
            width = int(rng.integers(1, 4097))
            q, indices = random_q(rng, 1, 2), random_indices(rng, 1, width, 128)
            kind = int(rng.integers(0, 20))
            if kind == 0:
                request = stream.attend(sequence, q, np.zeros((2, 3), np.int32), wait=False)  # does not fit
            elif kind == 1:
                request = stream.attend(sequence, q, indices, deadline_us=1, wait=False)
            else:
                request = stream.attend(sequence, q, indices, wait=False)
            if kind == 2:
                stream.cancel_request(request)
            pending[request] = kind
            while len(pending) > (64 if i + 1 < n else 0):
                request = next(iter(pending))
                kind = pending.pop(request)
                try:
                    stream.wait(request)
                    outcome = "ok"
                except Refused as refused:
                    outcome = refused.status.reason
                allowed = {0: ("BAD_SHAPE",), 1: ("DEADLINE", "ok"), 2: ("CANCELLED", "ok")}.get(
                    kind, ("ok",)
                )
                truth(outcome in allowed, "outcome %r of a request of kind %d" % (outcome, kind))
                counts[outcome] = counts.get(outcome, 0) + 1
        equal(sum(counts.values()), n, "every request has one outcome: %r" % counts)
        s.release(sequence)

    with server.session() as s:
        n = full(20000, 600)
        load(n // 4, s, s.stream)
        warm = server.rss(), server.n_fds(), server.n_maps()
        load(n, s, s.stream)
        now = server.rss(), server.n_fds(), server.n_maps()
        equal(server.control.pool().n_pages_used, 0, "pages")
        equal(now[1], warm[1], "descriptors")
        if not SANITIZED:
            truth(now[0] <= warm[0] * 1.05 + (1 << 20), "RSS %d, warm %d" % (now[0], warm[0]))


# ---- cancel races ----


@test()
def cancels_race_with_completion(server, rng):
    """NET-03: calls and streams ended by the client at every moment; nothing is lost and all goes on."""
    with server.session() as s:
        sequence = s.create()
        s.append(sequence, random_rows(rng, 256))
        slots, slot_bytes = itertools.count(), 4 * 16 * 512 * 2
        region = s.region((2 << 20) + 256 * slot_bytes)
        q, i = region.put(random_q(rng, 4, 16)), region.put(random_indices(rng, 4, 512, 256), 1 << 20)

        def out():  # requests in flight must not share the place of their results
            return pb.Output(region=region.slice((2 << 20) + next(slots) % 256 * slot_bytes))

        times = []
        for _ in range(20):
            begin = time.monotonic()
            s.attend([(sequence, 4)], q, i, out=out())
            times.append(time.monotonic() - begin)
        median = sorted(times)[10]
        for n in range(scaled(300, 40)):
            stream = AttendStream(s)
            for _ in range(int(rng.integers(1, 6))):
                request = stream.attend(
                    [(sequence, 4)],
                    q,
                    i,
                    out=out(),
                    wait=False,
                    deadline_us=int(rng.uniform(0.5, 1.5) * median * 1e6) + 1,
                )
                if n % 3 == 0:
                    stream.cancel_request(request)
            deadline = time.monotonic() + float(rng.uniform(0, 1.5)) * median
            while time.monotonic() < deadline:
                pass
            if n % 2:
                stream.bidi.cancel()
            else:
                stream.bidi.half_close()
        append = pb.AppendRequest(
            session=s.token, append=pb.AppendOp(sequence_id=sequence, rows=inline(random_rows(rng, 16)))
        )
        method = s.client.channel.unary_unary(
            "/%s/Append" % SERVICE,
            request_serializer=serialize,
            response_deserializer=pb.AppendReply.FromString,
        )
        outcomes = {}
        for _ in range(scaled(300, 40)):
            call = method.future(append, timeout=float(rng.uniform(0.0, 2.0)) * median + 1e-4)
            if rng.random() < 0.5:
                call.cancel()
            try:
                call.result()
                outcome = "OK"
            except grpc.FutureCancelledError:
                outcome = "CANCELLED"
            except grpc.RpcError as error:
                outcome = error.code().name
            truth(outcome in ("OK", "CANCELLED", "DEADLINE_EXCEEDED"), "outcome %s" % outcome)
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
        tokens = s.get(sequence).n_tokens
        truth(
            (tokens - 256) % 16 == 0 and tokens - 256 >= 16 * outcomes.get("OK", 0),
            "tokens %d after %r" % (tokens, outcomes),
        )
        s.attend([(sequence, 4)], q, i, out=out())
        wait_until(lambda: server.control.pool().queue_depth == 0, 5 * SLOW, "the queue is empty")


if __name__ == "__main__":
    main()
