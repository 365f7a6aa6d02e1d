#!/usr/bin/python3
"""test_neighbours.py - what one client does must not harm another, and nothing that was promised is lost on the way."""

from dsatest import *  # noqa: F403

# ---- one request, one fault ----


@test()
def strides_of_single_extents_do_not_matter(server, rng):
    """An axis of one is never stepped over: whatever stride it is given, the request is served."""
    with server.session() as s:
        sequence = s.create()
        s.append(sequence, random_rows(rng, 64))
        q, indices = random_q(rng, 1, 8), random_indices(rng, 1, 16, 64)
        expected = s.attend(sequence, q, indices).out_bits
        region = s.region(1 << 16)
        tensor = region.put(q)
        del tensor.strides_bytes[:]
        tensor.strides_bytes.extend([2, 1152, 2])
        same_bits(s.attend(sequence, tensor, indices).out_bits, expected, "an odd stride on an axis of one")
        region.unregister()


@test()
def inline_results_take_no_strides(server, rng):
    with server.session() as s:
        sequence = s.create()
        s.append(sequence, random_rows(rng, 64))
        q, indices = random_q(rng, 1, 8), random_indices(rng, 1, 16, 64)
        out = pb.Output(dtype=pb.DTYPE_BF16, strides_bytes=[8192, 1024, 2])
        expect_refusal(lambda: s.attend(sequence, q, indices, out=out), "BAD_SHAPE", "attend.out.strides_bytes")
        lse = pb.Output(dtype=pb.DTYPE_F32, strides_bytes=[64, 4])
        expect_refusal(
            lambda: s.attend(sequence, q, indices, want_lse=True, lse=lse), "BAD_SHAPE", "attend.lse.strides_bytes"
        )


@test()
def a_refused_attend_appends_nothing(server, rng):
    with server.session() as s:
        sequence = s.create()
        s.append(sequence, random_rows(rng, 100))
        op = pb.AppendOp(sequence_id=sequence, rows=inline(random_rows(rng, 3)))
        segments = [(sequence, 1), (sequence + 12345, 1)]
        q, indices = random_q(rng, 2, 4), random_indices(rng, 2, 8, 100)
        expect_refusal(
            lambda: s.attend(segments, q, indices, append=op), "NOT_FOUND", "attend.segments[1].sequence_id"
        )
        equal(s.get(sequence).n_tokens, 100, "tokens after the refusal")


@test(**{"max-message-bytes": 1 << 20, "max-inline-bytes": 1 << 19})
def a_message_above_the_limit_is_refused_alone(server, rng):
    with server.session() as s:
        sequence = s.create()
        s.append(sequence, random_rows(rng, 64))
        q, indices = random_q(rng, 1, 8), random_indices(rng, 1, 16, 64)
        expected = s.attend(sequence, q, indices).out_bits
        big = np.zeros(((1 << 20) // 1152 + 64, 576), np.uint16)
        before = s.attend(sequence, q, indices, wait=False)
        expect_refusal(lambda: s.stream.append(sequence, big), "TOO_LARGE", "message")
        same_bits(s.stream.wait(before).out_bits, expected, "the request before it")
        same_bits(s.attend(sequence, q, indices).out_bits, expected, "the request after it")
        expect_refusal(lambda: s.append(sequence, big), "TOO_LARGE", "message")


@test()
def replies_stay_below_what_clients_take(server, rng):
    """A gRPC client takes 4 MiB unless told otherwise: no reply with inline results comes near it."""
    with server.session() as s:
        sequence = s.create()
        s.append(sequence, random_rows(rng, 64))
        result = s.attend(sequence, random_q(rng, 24, 128), random_indices(rng, 24, 8, 64), out=pb.Output(dtype=pb.DTYPE_F32))
        equal(result.n_rows, 24, "rows")
        truth(max(len(p.SerializeToString()) for p in result.pieces) < 2 << 20, "a reply is larger than 2 MiB")


# ---- memory and places ----


@test(**{"max-queue-bytes": 1 << 20, "cpu-threads": 1})
def waiting_messages_are_bounded_in_bytes(server, rng):
    with server.session() as s:
        sequence = s.create()
        s.append(sequence, random_rows(rng, 256))
        q, indices = random_q(rng, 3, 128), random_indices(rng, 3, 256, 256)
        asked = [s.attend(sequence, q, indices, wait=False) for _ in range(24)]  # 440 KiB each
        outcomes = {"ok": 0, "full": 0}
        for request in asked:
            try:
                s.stream.wait(request)
                outcomes["ok"] += 1
            except Refused as refused:
                equal(refused.status.reason, "QUEUE_FULL", "the refusal")
                truth(refused.status.retry_after_us > 0, "a retry hint")
                outcomes["full"] += 1
        truth(outcomes["ok"] > 0 and outcomes["full"] > 0, "outcomes %r" % outcomes)


@test(**{"max-connections": 4})
def silent_descriptor_peers_make_room(server, rng):
    with server.session() as s:
        silent = [FdSocket(s.opened.fd_socket) for _ in range(8)]
        region = s.region(4096)
        region.unregister()
        for peer in silent:
            peer.close()


@test()
def memfds_of_huge_pages_are_refused(server, rng):
    with server.session() as s:
        try:
            fd = os.memfd_create("huge", os.MFD_HUGETLB | os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        except OSError as error:
            raise Skip("no huge-page memfds here: %s" % error)
        os.ftruncate(fd, 2 << 20)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        ticket = s.offer(fd)
        os.close(fd)
        expect_refusal(
            lambda: s.call("RegisterRegion", memfd=pb.MemfdRegion(fd_ticket=ticket), access=pb.REGION_ACCESS_READ, size=4096),
            "BAD_FD", "memfd.fd_ticket",
        )


# ---- the end ----


@test(own=True)
def answers_are_delivered_before_the_end(env, rng):
    """Results that were computed reach a client that starts reading only after the server was told to stop."""
    server = env.start()
    s = server.session()
    sequence = s.create()
    s.append(sequence, random_rows(rng, 64))
    q, indices = random_q(rng, 16, 64), random_indices(rng, 16, 16, 64)
    expected = s.attend(sequence, q, indices).out_bits
    stream = AttendStream(s, reads=False)
    asked = [stream.attend(sequence, q, indices, wait=False) for _ in range(20)]
    wait_until(lambda: server.control.stats().n_requests >= 21, 30 * SLOW, "all requests computed")
    server.signal()
    wait_until(lambda: server.control.health() != health_pb.HealthCheckResponse.SERVING, 5 * SLOW, "not ready")
    stream.bidi.start_reading()
    for request in asked:
        same_bits(stream.wait(request).out_bits, expected, "an answer after SIGTERM")
    equal(server.wait_exit(10 * SLOW), 0, "exit code")


@test(own=True)
def a_lost_log_reader_does_not_matter(env, rng):
    folder = tempfile.mkdtemp(prefix="dsa-e2e-")
    path = os.path.join(folder, "d.sock")
    process = subprocess.Popen(
        [env.dsad, "--listen", "unix:" + path, "--pool-pages", "64"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    wait_until(lambda: os.path.exists(path), 20 * SLOW, "the socket")
    process.stderr.close()
    client = Client("unix:" + path)
    for _ in range(3):  # each logs two lines
        with Session(client) as s:
            truth(s.create() > 0, "a sequence")
    client.close()
    process.terminate()
    equal(process.wait(10 * SLOW), 0, "exit code")


@test(own=True)
def drain_is_for_the_unix_socket(env, rng):
    port = free_port()
    server = env.start(tcp="127.0.0.1:%d" % port)
    remote = Client("127.0.0.1:%d" % port)
    expect_refusal(lambda: remote.call("Drain"), "ACCESS_DENIED")
    remote.close()
    server.control.call("Drain")
    equal(server.wait_exit(5 * SLOW), 0, "exit code")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


if __name__ == "__main__":
    main()
