"""busy.py - what several test programs use to keep a server busy."""

from dsatest import *  # noqa: F403


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
