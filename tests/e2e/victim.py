#!/usr/bin/python3
"""victim.py - a client that test_lifetime.py kills: does what its mode says, says "ready", and goes on until then."""

from dsatest import *  # noqa: F403


def hold(*_):
    threading.Event().wait()


def forever(step):
    def run(s, rng):
        s.forever = True
        step(s, rng)  # once before "ready"
        ready()
        while True:
            step(s, rng)

    return run


def ready():
    print("ready", flush=True)


def memfd(size=1 << 20):
    fd = os.memfd_create("victim", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


def filled(s, rng, n=200):
    sequence = s.create()
    s.append(sequence, random_rows(rng, n))
    return sequence


def do_sequences(s, rng):
    a = filled(s, rng)
    for n in (200, 64, 70, 1):
        s.fork(a, n)


def do_tickets(s, rng):
    for _ in range(20):
        s.offer(memfd())


def do_regions(s, rng):
    s.kept = [s.region(1 << 20) for _ in range(10)]


def do_append_loop(s, rng):
    filled(s, rng, 64 * 3 + 5)


def do_register_loop(s, rng):
    s.region(1 << 16).unregister()


def do_fork_loop(s, rng):
    if not hasattr(s, "root"):
        s.root = filled(s, rng)
    s.release(s.fork(s.root).id)


def do_attend_flight(s, rng):
    """A hundred requests in flight, reading and writing a region."""
    if not hasattr(s, "area"):
        s.out_bytes = 8 * 16 * 512 * 2
        s.area = s.region((2 << 20) + 100 * s.out_bytes)
        s.q = s.area.put(random_q(rng, 8, 16))
        s.i = s.area.put(random_indices(rng, 8, 512, 200), 1 << 20)
        s.root = filled(s, rng)
    for request_id in getattr(s, "flying", ()):  # their places are used again
        s.stream.wait(request_id)
    s.flying = [
        s.attend(
            [(s.root, 8)],
            s.q,
            s.i,
            wait=False,
            out=pb.Output(region=s.area.slice((2 << 20) + n * s.out_bytes)),
        )
        for n in range(100)
    ]


def do_inline_flight(s, rng):
    """Replies that nobody reads."""
    if not hasattr(s, "root"):
        s.root = filled(s, rng)
        s.deaf = AttendStream(s, reads=False)
    for _ in range(100):
        s.deaf.attend(s.root, random_q(rng, 4, 64), random_indices(rng, 4, 64, 200), wait=False)
    if getattr(s, "begun", False):
        hold()
    s.begun = True


def do_export_unread(s, rng):
    root = filled(s, rng, 3000)
    s.calls = [
        s.client.export(pb.ExportRowsRequest(session=s.token, sequence_id=root, dtype=pb.DTYPE_BF16))
        for _ in range(5)
    ]
    s.append(root, random_rows(rng, 10))


def do_beats(s, rng):
    s.lease.send(pb.SessionRequest(heartbeat=pb.SessionHeartbeat(seq=1)))
    s.lease.recv()


MODES = {
    "opened": None,
    "sequences": do_sequences,
    "tickets": do_tickets,
    "regions": do_regions,
    "append_loop": forever(do_append_loop),
    "register_loop": forever(do_register_loop),
    "fork_loop": forever(do_fork_loop),
    "attend_flight": forever(do_attend_flight),
    "inline_flight": forever(do_inline_flight),
    "export_unread": do_export_unread,
    "beats": forever(do_beats),
}


def run_victim():
    path, mode, seed = sys.argv[1:4]
    session = Session(Client("unix:" + path), name="victim")
    if MODES[mode]:
        MODES[mode](session, np.random.default_rng(int(seed)))
    ready()
    hold()


if __name__ == "__main__":
    run_victim()
