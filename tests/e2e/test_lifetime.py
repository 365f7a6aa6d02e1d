#!/usr/bin/python3
"""test_lifetime.py - who owns what, and for how long: killed clients, leases, regions in use, shutdown, exhaustion."""

from dsatest import *  # noqa: F403
import victim

# ---- helpers ----


class Blocker:
    """A long attend with its tensors in a region, sized by trial so that it keeps the worker busy for a while."""

    def __init__(self, server, rng, seconds, session=None):
        self.server, self.rng = server, rng
        self.session = s = session or server.session(name="blocker")
        self.region = s.region(16 << 20)
        self.sequence = s.create()
        s.append(self.sequence, random_rows(rng, 256))
        self.kv = s.export(self.sequence, dtype=pb.DTYPE_BF16)
        self.heads, self.width, trial = 8, 512, 32
        self.q_pool, self.i_pool = random_q(rng, 64, self.heads), random_indices(rng, 64, self.width, 256, 0)
        self.rows = trial
        begin = time.monotonic()
        self.run()
        took = max(1e-4, time.monotonic() - begin)
        self.rows = int(min(server.capabilities.limits.max_rows, max(64, trial * seconds / took)))
        need = self.rows * (self.heads * (576 + 512) * 2 + self.width * 4) + 8192
        if need > self.region.size:
            self.region.unregister()
            self.region = s.region(need)

    def start(self, **fields):
        tile = -(-self.rows // 64)
        q = np.tile(self.q_pool, (tile, 1, 1))[: self.rows]
        indices = np.tile(self.i_pool, (tile, 1))[: self.rows]
        self.indices_at = q.nbytes
        self.out_at = (q.nbytes + indices.nbytes + 4095) // 4096 * 4096
        tensors = self.region.put(q), self.region.put(indices, q.nbytes)
        return self.session.attend(
            [(self.sequence, self.rows)],
            *tensors,
            wait=False,
            out=pb.Output(region=self.region.slice(self.out_at)),
            **fields
        )

    def start_and_see(self, **fields):
        """Starts and waits until the worker is at it: its first launch is counted while the rest is still to come."""
        before = self.server.control.stats().n_batches
        request = self.start(**fields)
        wait_until(
            lambda: self.server.control.stats(timeout=60 * SLOW).n_batches > before,
            20 * SLOW,
            "the work has begun",
        )
        return request

    def run(self):
        self.session.stream.wait(self.start())

    def check(self):
        """The first and the last row of the result."""
        out = self.region.view(np.uint16, (self.rows, self.heads, 512), self.out_at)
        for row in (0, self.rows - 1):
            expected, _ = attend_reference(
                MAIN, self.q_pool[row % 64][None], self.kv, self.i_pool[row % 64][None], 0.05
            )
            truth(
                (
                    np.abs(f32(out[row]).reshape(1, self.heads, 512) - expected)
                    <= 1e-3 + 2.01 / 128 * np.abs(expected)
                ).all(),
                "row %d of a long attend" % row,
            )


def in_log(server, words, timeout=10 * SLOW):
    wait_until(lambda: words in server.text(), timeout, "%r in the log" % words)


def raw_connections(path, n, kind=socket.SOCK_STREAM):
    held = []
    for _ in range(n):
        s = socket.socket(socket.AF_UNIX, kind)
        s.setblocking(False)
        try:
            s.connect(path)
        except OSError:
            s.close()
            break
        held.append(s)
    return held


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
        for _ in range(scaled(400)):
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
            width = int(rng.integers(1, 600))
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
        n = scaled(6000, 400)
        load(n // 3, s, s.stream)
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


# ---- slow readers ----


@test(**{"pool-bytes": "32MiB", "pool-pages": 0, "max-stream-bytes": "4MiB", "stall-timeout": "60s"})
def slow_readers_do_not_grow_the_server(server, rng):
    """NET-01, scaled down: clients that ask for much and read nothing; a normal client goes on; then they read it all."""
    n_clients = 10 if not SANITIZED else 4
    tokens = 40000 if not SANITIZED else 8000
    with server.session(name="owner") as s:
        sequence = s.create()
        rows = np.tile(random_rows(rng, 400), (5, 1))
        for _ in range(tokens // 2000):
            s.append(sequence, rows)
        expected = dequantize(MAIN, quantize(MAIN, rows)[0])
        q, indices = random_q(rng, 4, 128), random_indices(rng, 4, 32, 400)
        want = s.attend(sequence, q, indices).out_bits
        before = server.rss()
        clients = [server.client() for _ in range(n_clients)]
        request = pb.ExportRowsRequest(session=s.token, sequence_id=sequence, dtype=pb.DTYPE_BF16)
        exports = [c.export(request, timeout=None) for c in clients]  # 46 MB each, unread
        deaf = AttendStream(s, reads=False)
        asked = [
            deaf.attend(sequence, q, indices, wait=False) for _ in range(scaled(400, 40))
        ]  # 512 KiB each, unread
        times = []
        for _ in range(scaled(200, 20)):
            begin = time.monotonic()
            same_bits(
                s.attend(sequence, q[:1], indices[:1]).out_bits, want[:1], "a normal client among slow ones"
            )
            times.append(time.monotonic() - begin)
        truth(
            sorted(times)[-1] < 2.0 * SLOW,
            "slowest round trip of the normal client %.3f s" % sorted(times)[-1],
        )
        grown = server.rss() - before
        bound = n_clients * (6 << 20) + (16 << 20)
        if not SANITIZED:
            truth(
                grown < bound,
                "the server grew by %d MiB for %d slow readers, bound %d MiB"
                % (grown >> 20, n_clients + 1, bound >> 20),
            )
        for number, export in enumerate(exports[:2]):
            at = 0
            for chunk in export:
                equal(chunk.first, at, "chunk after a pause")
                got = np.frombuffer(chunk.rows, np.uint16).reshape(-1, 576)
                same_bits(got, expected[(at + np.arange(len(got))) % 2000], "rows after a pause")
                at += chunk.n_tokens
            equal(at, tokens, "tokens of export %d" % number)
        for export in exports[2:]:
            export.cancel()
        deaf.bidi.start_reading()
        for request_id in asked:
            same_bits(deaf.wait(request_id).out_bits, want, "a reply read late")
        deaf.close()
        for client in clients:
            client.close()


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


@test()
def connect_check_close(server, rng):
    """OPS-01: probes by the hundred leave no descriptor."""
    before = None
    for i in range(scaled(600, 60)):
        client = server.client()
        equal(client.health().status, health_pb.HealthCheckResponse.SERVING, "health")
        client.close()
        if i == 20:
            before = server.n_fds()
    wait_until(
        lambda: server.n_fds() <= before + 3,
        5 * SLOW,
        "descriptors as before (%d, now %d)" % (before, server.n_fds()),
    )


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
    in_log(server, "SIGHUP")
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
            if refused.status.reason not in ("DRAINING", "NO_SESSION"):
                problems.append(refused)
        except grpc.RpcError as error:
            if error.code() not in (
                grpc.StatusCode.UNAVAILABLE,
                grpc.StatusCode.CANCELLED,
                grpc.StatusCode.UNAUTHENTICATED,
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
def sigterm_as_process_1(env, rng):
    """In a PID namespace of its own, as in a container: signals have no default action there."""
    if subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True).returncode != 0:
        raise Skip("no right to make a PID namespace")
    server = Server(env, wrapper=["unshare", "--pid", "--fork", "--kill-child"]).wait_ready()
    server.expect_working()
    with open("/proc/%d/task/%d/children" % (server.process.pid, server.process.pid)) as f:
        child = int(f.read())
    begin = time.monotonic()
    os.kill(child, signal.SIGTERM)
    equal(server.wait_exit(5 * SLOW), 0, "exit code as process 1")
    truth(time.monotonic() - begin < 1.5 * SLOW, "took %.2f s as process 1" % (time.monotonic() - begin))


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
