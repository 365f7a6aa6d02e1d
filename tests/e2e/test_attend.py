#!/usr/bin/python3
"""test_attend.py - what attend answers, and sequences: known numbers, options, order, forks, pages, poison."""

from dsatest import *  # noqa: F403

LN = np.log

# ---- attend: cases with known numbers ----


def unit_q(dims, heads=1):
    q = np.zeros((1, heads, MAIN.d_qk), np.float32)
    q[0, 0, dims] = 1
    return bf16(q)


def key(**dims):
    row = np.zeros(MAIN.d_qk, np.float32)
    for name, value in dims.items():
        row[int(name[1:])] = value
    return row


@test()
def known_numbers(server, rng):
    """Two keys; duplicates; RoPE tail; empty rows; a plain mean."""
    with server.session() as s:
        sequence = s.create()
        s.append(
            sequence,
            bf16(
                np.stack([key(d0=0, d1=4), key(d0=1, d1=8), key(d1=3), key(d1=6), key(d0=1, d512=2), key()])
            ),
        )

        def ask(q, lanes, scale, **fields):
            r = s.attend(
                sequence,
                q,
                np.array([lanes], np.int32),
                scale=scale,
                want_lse=True,
                out=pb.Output(dtype=pb.DTYPE_F32),
                **fields
            )
            return r.out[0, 0], float(r.lse[0, 0]), r

        def near(got, expected, what):
            truth(
                abs(got - expected) <= 1e-5 * max(1, abs(expected)),
                "%s is %.9g, expected %.9g" % (what, got, expected),
            )

        ln3 = float(np.float32(LN(3)))
        for lanes in ([0, 1], [1, 0]):
            out, lse, _ = ask(unit_q([0]), lanes, ln3)
            near(out[0], 0.75, "two keys, dim 0")
            near(out[1], 7.0, "two keys, dim 1")
            near(lse, LN(4), "two keys, lse")
        out, lse, _ = ask(unit_q([]), [2, 3, 3], 1.0)
        near(out[1], 5.0, "duplicates count")
        near(lse, LN(3), "lse with duplicates")
        q = np.zeros((1, 1, 576), np.float32)
        q[0, 0, 512] = 1
        out, lse, r = ask(bf16(q), [4, 5], 0.5)
        equal(r.out.shape, (1, 1, 512), "width of the output")
        near(out[0], 0.7310585786, "RoPE tail")
        near(lse, 1.3132616875, "RoPE tail, lse")
        out, lse, _ = ask(unit_q([0]), [0, 1], 0.0)
        near(out[1], 6.0, "scale 0 is the plain mean")
        near(lse, LN(2), "scale 0, lse")
        out, lse, _ = ask(unit_q([0]), [0, 1], -ln3)
        near(out[0], 0.25, "a negative scale")
        for lanes in ([-1], [-1] * 65, [6, 1000, 2**31 - 1, -(2**31)]):
            out, lse, r = ask(unit_q([0]), lanes, 1.0)
            truth((r.out_bits == 0).all(), "an empty row is +0 in every bit")
            equal(lse, -np.inf, "lse of an empty row")
        one = ask(unit_q([0]), [1], 1.0)[0]
        for lanes in ([-1] * 64 + [1], [1] + [-1] * 2047, [-1] * 2047 + [1], [-1] * 33 + [1] + [-1] * 31):
            same_bits(ask(unit_q([0]), lanes, 1.0)[0], one, "one entry among holes")


@test()
def softmax_scale_is_always_needed(server, rng):
    with server.session() as s:
        sequence = s.create()
        rows, q = random_rows(rng, 64), random_q(rng, 2, 4)
        indices = random_indices(rng, 2, 32, 64)
        s.append(sequence, rows)
        for scale, text in (
            (None, "absent"),
            (float("nan"), "nan"),
            (float("inf"), "inf"),
            (float("-inf"), "-inf"),
        ):
            status = expect_refusal(
                lambda: s.attend(sequence, q, indices, scale=scale),
                "BAD_REQUEST",
                "attend.softmax_scale",
                text,
            )
            equal(status.code, grpc.StatusCode.INVALID_ARGUMENT.value[0], "code")
        kv = s.export(sequence, dtype=pb.DTYPE_BF16)
        doubled = bf16(f32(q).reshape(q.shape) * 2)
        halved = bf16(f32(q).reshape(q.shape) / 2)
        base = s.attend(sequence, q, indices, scale=0.04, want_lse=True)
        for other, scale in ((doubled, 0.02), (halved, 0.08)):
            result = s.attend(sequence, other, indices, scale=scale, want_lse=True)
            check_attend(
                result, base.out.astype(np.float64), base.lse.astype(np.float64), "same score, other split"
            )
        for scale in (0.0, -0.03, 1.0):
            check_attend(
                s.attend(sequence, q, indices, scale=scale, want_lse=True),
                *attend_reference(MAIN, q, kv, indices, scale),
                "scale %g" % scale
            )


@test()
def attend_options(server, rng):
    """Heads, widths, lengths, sink, lse, invalid counts, f32 output."""
    with server.session() as s:
        sequence = s.create()
        s.append(sequence, random_rows(rng, 300))
        kv = s.export(sequence, dtype=pb.DTYPE_BF16)
        for heads, width, s_q in (
            (1, 1, 1),
            (1, 63, 3),
            (3, 64, 2),
            (16, 65, 2),
            (64, 129, 2),
            (128, 2051, 1),
            (7, 2112, 2),
        ):
            q, indices = random_q(rng, s_q, heads), random_indices(rng, s_q, width, 300, 0.3)
            lengths = rng.integers(0, width + 1, s_q).astype(np.int32)
            sink = rng.standard_normal(heads).astype(np.float32) * 2
            sink[0] = -np.inf
            for given in ({}, {"lengths": lengths}, {"sink": sink}, {"lengths": lengths, "sink": sink}):
                result = s.attend(sequence, q, indices, want_lse=True, **given)
                check_attend(
                    result,
                    *attend_reference(MAIN, q, kv, indices, 0.05, **given),
                    "heads %d width %d %s" % (heads, width, sorted(given))
                )
        q, indices = random_q(rng, 3, 2), random_indices(rng, 3, 16, 300, 0)
        indices[0, :4] = [-1, -2, 300, 2**31 - 1]
        indices[2, 0] = -(2**31)
        result = s.attend(sequence, q, indices, want_lse=True)
        equal(result.n_invalid, 4, "n_invalid: out of range other than -1")
        check_attend(result, *attend_reference(MAIN, q, kv, indices, 0.05), "with invalid lanes")
        for lengths, expected in (([0, 0, 0], True), ([-5, 0, -(2**31)], True), ([99, 17, 2**31 - 1], False)):
            lengths = np.array(lengths, np.int32)
            result = s.attend(sequence, q, indices, lengths=lengths, want_lse=True)
            check_attend(
                result, *attend_reference(MAIN, q, kv, indices, 0.05, lengths=lengths), "lengths %r" % lengths
            )
            equal(bool(np.isneginf(result.lse).all()), expected, "empty with lengths %r" % lengths)
        truth(s.attend(sequence, q, indices).lse is None, "lse comes only when wanted")
        twice = [s.attend(sequence, q, indices, want_lse=True, batch_invariant=True) for _ in range(2)]
        same_bits(twice[0].out_bits, twice[1].out_bits, "the same request twice")


@test()
def sinks_with_extremes(server, rng):
    with server.session() as s:
        sequence = s.create()
        s.append(sequence, random_rows(rng, 40))
        kv = s.export(sequence, dtype=pb.DTYPE_BF16)
        q, indices = random_q(rng, 2, 4), random_indices(rng, 2, 20, 40)
        indices[1] = -1
        sink = np.array([-np.inf, np.inf, 1e4, -1e4], np.float32)
        result = s.attend(sequence, q, indices, sink=sink, want_lse=True)
        check_attend(result, *attend_reference(MAIN, q, kv, indices, 0.05, sink=sink), "extreme sinks")
        truth((result.out_bits[1] == 0).all(), "an empty row with sinks stays +0")


@test()
def several_segments(server, rng):
    with server.session() as s:
        sizes = (1, 64, 65, 200)
        sequences, kv = [], []
        for n in sizes:
            sequences.append(s.create())
            s.append(sequences[-1], random_rows(rng, n))
            kv.append(s.export(sequences[-1], dtype=pb.DTYPE_BF16))
        order = [(2, 3), (0, 1), (3, 2), (2, 1), (1, 4)]
        total = sum(n for _, n in order)
        q, indices = random_q(rng, total, 6), random_indices(rng, total, 50, 210, 0.1)
        per_row = [kv[i] for i, n in order for _ in range(n)]
        result = s.attend([(sequences[i], n) for i, n in order], q, indices, want_lse=True)
        check_attend(result, *attend_reference(MAIN, q, per_row, indices, 0.05), "five segments")
        expected = sum(int((indices[t] >= len(per_row[t])).sum()) for t in range(total))
        equal(result.n_invalid, expected, "each row is held to its own sequence's length")


@test()
def append_inside_attend(server, rng):
    """The append comes first; the rows that it adds can be read by the same request."""
    with server.session() as s:
        sequence = s.create()
        rows = random_rows(rng, 130)
        s.append(sequence, rows[:63])
        for n, begin in ((1, 63), (2, 64), (64, 66)):
            end = begin + n
            q = random_q(rng, n, 4)
            indices = np.tile(np.arange(end, dtype=np.int32)[-50:], (n, 1))
            op = pb.AppendOp(sequence_id=sequence, rows=inline(rows[begin:end]), position=begin)
            result = s.attend(sequence, q, indices, want_lse=True, append=op)
            equal(result.n_tokens, end, "n_tokens after the append")
            kv = dequantize(MAIN, quantize(MAIN, rows[:end])[0])
            check_attend(result, *attend_reference(MAIN, q, kv, indices, 0.05), "attend after its append")
        q = random_q(rng, 1, 4)
        op = pb.AppendOp(sequence_id=sequence, rows=inline(rows[:1]), position=5)
        expect_refusal(
            lambda: s.attend(sequence, q, np.zeros((1, 8), np.int32), append=op),
            ("BAD_RANGE", "FAILED_PRECONDITION"),
            "attend.append.position",
            5,
        )
        equal(s.get(sequence).n_tokens, 130, "tokens after a refused append")


@test()
def order_within_a_stream(server, rng):
    """Appends and attends on one sequence, all in flight at once: each attend sees exactly what was sent before it."""
    n = scaled(200, 40)
    with server.session() as s:
        sequence = s.create()
        rows = random_rows(rng, n)
        kv = dequantize(MAIN, quantize(MAIN, rows)[0])
        q = random_q(rng, 1, 2)
        everything = np.arange(n, dtype=np.int32)[None, :]
        asked = []
        for i in range(n):
            s.stream.append(sequence, rows[i : i + 1], wait=False)
            asked.append(s.attend(sequence, q, everything, want_lse=True, wait=False))
        for i, request_id in enumerate(asked):
            result = s.stream.wait(request_id)
            check_attend(
                result, *attend_reference(MAIN, q, kv[: i + 1], everything, 0.05), "after %d tokens" % (i + 1)
            )
            equal(result.n_invalid, n - i - 1, "tokens not yet there")
        equal(s.get(sequence).n_tokens, n, "tokens")


@test()
def many_in_flight(server, rng):
    n = scaled(600, 100)
    with server.session() as s:
        sequences = [s.create() for _ in range(4)]
        kv = []
        for sequence in sequences:
            s.append(sequence, random_rows(rng, 100))
            kv.append(s.export(sequence, dtype=pb.DTYPE_BF16))
        asked = []
        for i in range(n):
            heads = (2, 4)[i % 2]
            q, indices = random_q(rng, 1 + i % 3, heads), random_indices(rng, 1 + i % 3, 30, 100)
            asked.append(
                (
                    i % 4,
                    q,
                    indices,
                    s.attend(
                        sequences[i % 4],
                        q,
                        indices,
                        want_lse=True,
                        wait=False,
                        priority=int(rng.integers(-100, 101)),
                    ),
                )
            )
        for which, q, indices, request_id in asked:
            check_attend(
                s.stream.wait(request_id), *attend_reference(MAIN, q, kv[which], indices, 0.05), "in flight"
            )


@test(**{"chunk-rows": 16})
def long_prefill_comes_in_pieces(server, rng):
    with server.session() as s:
        sequence = s.create()
        s.append(sequence, random_rows(rng, 128))
        kv = s.export(sequence, dtype=pb.DTYPE_BF16)
        q, indices = random_q(rng, 100, 4), random_indices(rng, 100, 20, 128)
        result = s.attend(sequence, q, indices, want_lse=True)
        equal([p.n_rows for p in result.pieces], [16] * 6 + [4], "rows of the pieces")
        equal([p.last for p in result.pieces], [False] * 6 + [True], "last")
        truth(
            result.last.HasField("timings") and result.last.timings.total_us > 0,
            "timings with the last piece",
        )
        check_attend(result, *attend_reference(MAIN, q, kv, indices, 0.05), "a long prefill")
        big = random_q(rng, 60, 128)
        wide = random_indices(rng, 60, 8, 128)
        region = s.region(big.nbytes)
        result = s.attend(
            [(sequence, 60)], region.put(big), wide, out=pb.Output(dtype=pb.DTYPE_F32), want_lse=True
        )
        check_attend(result, *attend_reference(MAIN, big, kv, wide, 0.05), "a long reply, inline")


def uneven_pieces(server, rng):
    """However launches and pieces are cut, every row is answered once."""
    with server.session() as s:
        sequence = s.create()
        s.append(sequence, random_rows(rng, 128))
        kv = s.export(sequence, dtype=pb.DTYPE_BF16)
        asked = []
        for rows in (1, 2, 3, 7, 8, 9, 64, 65, 130):
            q, indices = random_q(rng, rows, 4), random_indices(rng, rows, 20, 128)
            asked.append((q, indices, s.attend(sequence, q, indices, want_lse=True, wait=False)))
        for q, indices, request in asked:
            check_attend(
                s.stream.wait(request), *attend_reference(MAIN, q, kv, indices, 0.05), "%d rows" % len(q)
            )


@test(**{"batch-rows": 1, "chunk-rows": 1})
def rows_one_by_one(server, rng):
    uneven_pieces(server, rng)


@test(**{"batch-rows": 7, "chunk-rows": 3})
def batches_and_chunks_that_do_not_divide(server, rng):
    uneven_pieces(server, rng)


@test(**{"batch-rows": 65536, "chunk-rows": 65536})
def chunks_larger_than_requests(server, rng):
    uneven_pieces(server, rng)


@test(**{"max-message-bytes": 65536, "max-inline-bytes": "64KiB"})
def one_row_larger_than_a_message_is_refused(server, rng):
    """128 heads of fp32 need 256 KiB a row: no reply of this server can carry one."""
    with server.session() as s:
        sequence = s.create()
        s.append(sequence, random_rows(rng, 8))
        region = s.region(1 << 20)
        q = random_q(rng, 1, 128)
        indices = np.zeros((1, 4), np.int32)
        expect_refusal(
            lambda: s.attend(sequence, region.put(q), indices, out=pb.Output(dtype=pb.DTYPE_F32)),
            "TOO_LARGE",
            "attend.out",
        )
        result = s.attend(
            sequence,
            region.put(q),
            indices,
            out=pb.Output(dtype=pb.DTYPE_F32, region=region.slice(512 << 10)),
        )
        truth(result.out is None, "the same result fits a region")


@test(**{"max-message-bytes": 65536, "max-inline-bytes": "64KiB"})
def export_fits_small_messages(server, rng):
    """Chunks are cut to the message limit; nothing is lost on the way."""
    with server.session() as s:
        region = s.region(1 << 20)
        rows = random_rows(rng, 900)
        sequence = s.create()
        s.append(sequence, region.put(rows))
        stored = quantize(MAIN, rows)[0]
        same_bits(s.export(sequence), stored, "stored bytes")
        same_bits(s.export(sequence, dtype=pb.DTYPE_BF16), dequantize(MAIN, stored), "bf16 rows")


@test(layers=2)
def layers_are_separate(server, rng):
    with server.session() as s:
        sequence = s.create()
        both = np.stack([random_rows(rng, 70), random_rows(rng, 70)])
        s.append(sequence, inline(both), n_layers=2)
        extra = random_rows(rng, 5)
        equal(s.append(sequence, extra, layer=1).n_tokens, 75, "length of layer 1")
        state = s.get(sequence)
        equal((state.n_tokens, list(state.layer_tokens), state.n_pages), (70, [70, 75], 2), "the sequence")
        q, indices = random_q(rng, 1, 2), np.arange(75, dtype=np.int32)[None, :]
        for layer, rows in ((0, both[0]), (1, np.concatenate([both[1], extra]))):
            kv = dequantize(MAIN, quantize(MAIN, rows)[0])
            result = s.attend(sequence, q, indices, layer=layer, want_lse=True)
            check_attend(result, *attend_reference(MAIN, q, kv, indices, 0.05), "layer %d" % layer)
            equal(result.n_invalid, 75 - len(rows), "each layer has its own length")
            same_bits(s.export(sequence, layer=layer), quantize(MAIN, rows)[0], "bytes of layer %d" % layer)


@test(**{"physical-indices": "true"})
def physical_indices(server, rng):
    with server.session() as s:
        a, b = s.create(), s.create()
        rows = random_rows(rng, 200)
        for begin in range(0, 200, 50):  # pages of both in turns
            s.append(a, rows[begin : begin + 25])
            s.append(b, rows[begin + 25 : begin + 50])
        mine, other = s.get(a), s.get(b)
        equal(len(mine.page_ids), 2, "pages of the sequence")
        truth(not set(mine.page_ids) & set(other.page_ids), "no page has two owners")
        kv = s.export(a, dtype=pb.DTYPE_BF16)
        logical = random_indices(rng, 3, 40, 100)
        table = np.array(mine.page_ids, np.int32)
        physical = np.where(logical >= 0, table[logical // 64] * 64 + logical % 64, -1).astype(np.int32)
        q = random_q(rng, 3, 4)
        by_position = s.attend(a, q, logical, want_lse=True)
        check_attend(by_position, *attend_reference(MAIN, q, kv, logical, 0.05), "logical")
        for owner in (a, 0):
            by_slot = s.attend([(owner, 3)], q, physical, space=pb.INDEX_SPACE_PHYSICAL, want_lse=True)
            same_bits(by_slot.out_bits, by_position.out_bits, "physical against logical")
            same_bits(by_slot.lse, by_position.lse, "lse, physical against logical")
        slots = server.capabilities.pools[0].n_pages * 64
        physical[0, :3] = [slots, 2**31 - 1, -7]
        logical[0, :3] = -1
        result = s.attend([(0, 3)], q, physical, space=pb.INDEX_SPACE_PHYSICAL, want_lse=True)
        check_attend(result, *attend_reference(MAIN, q, kv, logical, 0.05), "slots past the pool")
        equal(result.n_invalid, 3, "slots past the pool are counted")


@test()
def physical_indices_need_the_flag(server, rng):
    with server.session() as s:
        sequence = s.create()
        s.append(sequence, random_rows(rng, 3))
        q, indices = random_q(rng, 1, 1), np.zeros((1, 1), np.int32)
        expect_refusal(
            lambda: s.attend(sequence, q, indices, space=pb.INDEX_SPACE_PHYSICAL),
            "ACCESS_DENIED",
            "attend.space",
        )
        expect_refusal(lambda: s.attend(sequence, q, indices, space=0), "BAD_REQUEST", "attend.space", 0)
        expect_refusal(lambda: s.attend(0, q, indices), "NOT_FOUND", "attend.segments[0].sequence_id", 0)
        equal(list(s.get(sequence).page_ids), [], "page ids are not told without the flag")


# ---- sequences ----


@test()
def fork_counts_and_copies(server, rng):
    """POOL-02: page 64, A has 70 tokens; each fork reads its own rows, pages as counted by hand."""
    for n, pages_after_fork, shared in ((70, 3, 1), (65, 3, 1), (64, 2, 1), (63, 3, 0), (1, 3, 0)):
        for a_first in (True, False):
            with server.session() as s:
                a = s.create()
                rows, own_a, own_b = random_rows(rng, 70), random_rows(rng, 1), random_rows(rng, 1)
                s.append(a, rows)
                equal(server.control.pool().n_pages_used, 2, "pages of A")
                forked = s.fork(a, n)
                b = forked.id
                equal(forked.n_tokens, n, "tokens of the fork")
                pool = server.control.pool()
                equal(
                    (pool.n_pages_used, pool.n_pages_shared),
                    (pages_after_fork, shared),
                    "pages after a fork at %d" % n,
                )
                equal(s.get(a).n_pages_shared, shared, "A's shared pages")
                equal(pool.page_refs, pool.n_pages_used + shared, "references")
                for sequence, own in (((a, own_a), (b, own_b)) if a_first else ((b, own_b), (a, own_a))):
                    s.append(sequence, own)
                same_bits(
                    s.export(a), quantize(MAIN, np.concatenate([rows, own_a]))[0], "A after both appends"
                )
                same_bits(
                    s.export(b), quantize(MAIN, np.concatenate([rows[:n], own_b]))[0], "B after both appends"
                )
                s.release(a if a_first else b)
                left, expected = (
                    (b, np.concatenate([rows[:n], own_b])) if a_first else (a, np.concatenate([rows, own_a]))
                )
                same_bits(s.export(left), quantize(MAIN, expected)[0], "the other after a release")
                pool = server.control.pool()
                equal(
                    (pool.n_pages_used, pool.n_pages_shared),
                    (-(-len(expected) // 64), 0),
                    "pages after a release",
                )


@test()
def forks_of_forks(server, rng):
    with server.session() as s:
        a = s.create()
        rows = random_rows(rng, 200)  # 3 full pages and 8 tokens
        s.append(a, rows)
        b = s.fork(a).id
        c = s.fork(b, 130).id
        pool = server.control.pool()
        # A: 4 pages; B: 3 shared + 1 copy; C: 2 shared + 1 copy of the third page
        equal((pool.n_pages_used, pool.n_pages_shared, pool.page_refs), (6, 3, 11), "pages of A, B and C")
        s.append(c, rows[130:140])
        s.append(a, rows[:1])
        same_bits(s.export(c), quantize(MAIN, rows[:140])[0], "C")
        same_bits(s.export(b), quantize(MAIN, rows)[0], "B")
        s.truncate(b, 10)  # the first page is shared: 10 tokens of it are kept, nothing copied until a write
        same_bits(s.export(b), quantize(MAIN, rows[:10])[0], "B cut")
        s.append(b, rows[50:60])
        same_bits(
            s.export(b), quantize(MAIN, np.concatenate([rows[:10], rows[50:60]]))[0], "B after its own write"
        )
        same_bits(s.export(a)[:200], quantize(MAIN, rows)[0], "A is not disturbed")
        same_bits(s.export(c), quantize(MAIN, rows[:140])[0], "C is not disturbed")
        for sequence in (a, b, c):
            s.release(sequence)
        equal(server.control.pool().n_pages_used, 0, "pages after the last release")


@test()
def fork_and_truncate_bounds(server, rng):
    with server.session() as s:
        a = s.create()
        expect_refusal(lambda: s.fork(a, 1), "BAD_RANGE", "n_tokens", 1)
        s.append(a, random_rows(rng, 70))
        for n in (71, 2**64 - 1):
            expect_refusal(lambda: s.fork(a, n), "BAD_RANGE", "n_tokens", n)
            expect_refusal(lambda: s.truncate(a, n), "BAD_RANGE", "n_tokens", n)
        for keep, pages in ((70, 2), (65, 2), (64, 1), (1, 1), (0, 0)):
            state = s.truncate(a, keep)
            equal(
                (state.n_tokens, state.n_pages, server.control.pool().n_pages_used),
                (keep, pages, pages),
                "truncate",
            )
        for unknown in (0, 99999, 2**64 - 1):
            for name in ("ForkSequence", "TruncateSequence", "ReleaseSequence", "GetSequence"):
                expect_refusal(lambda: s.call(name, sequence_id=unknown), "NOT_FOUND", "sequence_id", unknown)
        expect_refusal(
            lambda: s.call("CreateSequence", device_uuid="GPU-none"),
            ("NOT_FOUND", "BAD_REQUEST"),
            "device_uuid",
            "GPU-none",
        )
        uuid = server.capabilities.devices[0].uuid
        equal(s.call("CreateSequence", device_uuid=uuid).device_uuid, uuid, "device of a sequence")


@test(**{"pool-pages": 4})
def full_pool_is_an_ordinary_answer(server, rng):
    with server.session() as s:
        a, b = s.create(), s.create()
        rows = random_rows(rng, 260)
        s.append(a, rows[:190])  # 3 pages
        s.append(b, rows[:64])
        status = expect_refusal(
            lambda: s.append(b, rows[:1]), "NO_PAGES", code=grpc.StatusCode.RESOURCE_EXHAUSTED
        )
        truth(status.retry_after_us > 0, "NO_PAGES gives a retry hint")
        equal(s.append(a, rows[190:192]).n_tokens, 192, "room in A's own last page")
        expect_refusal(lambda: s.append(a, rows[:1]), "NO_PAGES")
        expect_refusal(lambda: s.stream.append(a, rows[:1]), "NO_PAGES")
        op = pb.AppendOp(sequence_id=a, rows=inline(rows[:1]))
        expect_refusal(
            lambda: s.attend(a, random_q(rng, 1, 1), np.zeros((1, 1), np.int32), append=op), "NO_PAGES"
        )
        expect_refusal(lambda: s.fork(a, 65), "NO_PAGES")
        equal(s.get(a).n_tokens, 192, "A after the refusals")
        same_bits(s.export(a), quantize(MAIN, rows[:192])[0], "A is usable after a failed fork")
        fork = s.fork(a, 64)
        equal(server.control.pool().n_pages_shared, 1, "a fork at a page edge needs no page")
        s.release(b)
        s.append(fork.id, rows[64:65])
        same_bits(s.export(fork.id), quantize(MAIN, rows[:65])[0], "the fork goes on after a release")
        expect_refusal(lambda: s.append(a, rows[:1]), "NO_PAGES")


@test(**{"max-sequence-tokens": 256})
def draft_tokens_near_the_limit(server, rng):
    """DSA-05: up to 256 tokens with 4 query rows; 257 is refused and changes nothing; a padded row is empty."""
    with server.session() as s:
        rows = random_rows(rng, 264)
        kv = dequantize(MAIN, quantize(MAIN, rows)[0])
        for length in range(252, 257):
            sequence = s.create()
            s.append(sequence, rows[: length - 4])
            q = random_q(rng, 4, 3)
            indices = np.tile(np.arange(length, dtype=np.int32), (4, 1))
            indices[3] = -1
            op = pb.AppendOp(sequence_id=sequence, rows=inline(rows[length - 4 : length]))
            result = s.attend(sequence, q, indices, append=op, want_lse=True)
            check_attend(result, *attend_reference(MAIN, q, kv[:length], indices, 0.05), "length %d" % length)
            pages = server.control.pool().n_pages_used
            for n in range(257 - length, 261 - length):
                op = pb.AppendOp(sequence_id=sequence, rows=inline(rows[length : length + n]))
                expect_refusal(lambda: s.attend(sequence, q, indices, append=op), ("BAD_RANGE", "LIMIT"))
                expect_refusal(lambda: s.append(sequence, rows[length : length + n]), ("BAD_RANGE", "LIMIT"))
            equal(server.control.pool().n_pages_used, pages, "pages after refused appends")
            same_bits(s.export(sequence), quantize(MAIN, rows[:length])[0], "rows after refused appends")
            s.release(sequence)
        sequence = s.create()
        s.append(sequence, rows[:10])
        expect_refusal(
            lambda: s.attend([(sequence, 4)], random_q(rng, 4, 2), np.zeros((3, 4), np.int32)),
            "BAD_SHAPE",
            "attend.indices.shape[0]",
            3,
        )


@test()
def append_position_is_checked(server, rng):
    with server.session() as s:
        a = s.create()
        rows = random_rows(rng, 5)
        s.append(a, rows, position=0)
        s.append(a, rows, position=5)
        for position in (0, 9, 11, 2**64 - 1):
            expect_refusal(
                lambda: s.append(a, rows, position=position),
                ("BAD_RANGE", "FAILED_PRECONDITION"),
                "append.position",
                position,
            )
            expect_refusal(
                lambda: s.stream.append(a, rows, position=position),
                ("BAD_RANGE", "FAILED_PRECONDITION"),
                "append.position",
                position,
            )
        equal(s.get(a).n_tokens, 10, "tokens")


@test(layers=3)
def layers_of_different_length(server, rng):
    """Several layers in one append must begin at one position: refused or done right for each, never mixed up."""
    with server.session() as s:
        sequence = s.create()
        first, second = random_rows(rng, 70), random_rows(rng, 10)
        s.append(sequence, first)
        both = np.stack([random_rows(rng, 5), random_rows(rng, 5)])
        expected = [first, np.zeros((0, 576), np.uint16)]
        try:
            s.append(sequence, inline(both), n_layers=2)
            expected = [np.concatenate([first, both[0]]), both[1]]
        except grpc.RpcError as error:
            truth(
                refused_from(error).status.reason in ("FAILED_PRECONDITION", "BAD_REQUEST", "BAD_RANGE"),
                "%s" % error.details(),
            )
        equal(list(s.get(sequence).layer_tokens), [len(expected[0]), len(expected[1]), 0], "layer lengths")
        s.append(sequence, second, layer=1)
        expected[1] = np.concatenate([expected[1], second])
        for layer, rows in enumerate(expected):
            same_bits(s.export(sequence, layer=layer), quantize(MAIN, rows)[0], "layer %d" % layer)
        for bad in (
            pb.Tensor(dtype=1, shape=[70, 576], inline=bytes(70 * 1152)),
            pb.Tensor(dtype=1, shape=[2, 35, 576], inline=bytes(70 * 1152)),
        ):
            expect_refusal(lambda: s.append(sequence, bad, n_layers=3), "BAD_SHAPE")
        expect_refusal(
            lambda: s.append(sequence, inline(both), layer=2, n_layers=2), "BAD_RANGE", "append.n_layers", 2
        )


@test(layers=3)
def strict_append_is_all_or_nothing(server, rng):
    """NaN in the last layer only: no layer grows, no page stays, and an attend that rides on it does not run."""
    with server.session() as s:
        sequence = s.create()
        good = np.stack([random_rows(rng, 70) for _ in range(3)])
        bad = good.copy()
        bad[2, 69, 511] = 0x7FC0
        expect_refusal(lambda: s.append(sequence, inline(bad), n_layers=3, strict=True), "NONFINITE")
        state = s.get(sequence)
        equal(
            (list(state.layer_tokens), state.n_pages, server.control.pool().n_pages_used),
            ([0, 0, 0], 0, 0),
            "afterwards",
        )
        s.append(sequence, inline(good), n_layers=3, strict=True)
        region = s.region(1 << 16)
        region.bytes[:] = 0xEE
        op = pb.AppendOp(sequence_id=sequence, n_layers=3, rows=inline(bad), strict=True)
        expect_refusal(
            lambda: s.attend(
                sequence,
                random_q(rng, 2, 3),
                np.zeros((2, 4), np.int32),
                append=op,
                out=pb.Output(region=region.slice()),
            ),
            "NONFINITE",
        )
        truth((region.bytes == 0xEE).all(), "an attend whose append failed has written its output")
        equal(list(s.get(sequence).layer_tokens), [70, 70, 70], "layers afterwards")
        for layer in range(3):
            same_bits(s.export(sequence, layer=layer), quantize(MAIN, good[layer])[0], "layer %d" % layer)


def check_strict(layout):
    @test(layout=layout.name)
    def strict_looks_at_every_value(server, rng):
        """The first and the last value of a row, RoPE and unquantised layouts included."""
        with server.session() as s:
            sequence = s.create()
            for at in (0, layout.d_v - 1, layout.d_qk - 1):
                for bits in (0x7FC0, 0x7F80, 0xFF80):
                    rows = random_rows(rng, 3, layout)
                    rows[1, at] = bits
                    expect_refusal(lambda: s.append(sequence, rows, strict=True), "NONFINITE")
                    equal(s.append(sequence, rows).n_nonfinite, 1, "n_nonfinite with %#x at %d" % (bits, at))
                    s.truncate(sequence, 0)

    strict_looks_at_every_value.__name__ = "strict_" + layout.name


for each in (MAIN, LAYOUT["bf16_576"], LAYOUT["raw_512_64"]):
    check_strict(each)


@test()
def forks_written_at_the_same_time(server, rng):
    """POOL-02: A and its forks append and attend concurrently from streams of their own."""
    with server.session() as s:
        base = random_rows(rng, 70)
        root = s.create()
        s.append(root, base)
        family = [root] + [s.fork(root, n).id for n in (70, 65, 64, 63)]
        lengths = [70, 70, 65, 64, 63]
        own = [random_rows(rng, 90) for _ in family]
        streams = [AttendStream(s) for _ in family]
        asked = []
        for i in range(0, 90, 3):
            for sequence, rows, stream in zip(family, own, streams):
                asked.append((stream, stream.append(sequence, rows[i : i + 3], wait=False)))
        for stream, request in asked:
            stream.wait(request)
        for sequence, n, rows in zip(family, lengths, own):
            same_bits(
                s.export(sequence), quantize(MAIN, np.concatenate([base[:n], rows]))[0], "a fork at %d" % n
            )
        for stream in streams:
            stream.close()


@test()
def batch_invariant_rows(server, rng):
    """With the flag, a row gives the same bits alone and among any others."""
    with server.session() as s:
        sequence = s.create()
        s.append(sequence, random_rows(rng, 500))
        q, indices = random_q(rng, 40, 8), random_indices(rng, 40, 300, 500)
        together = s.attend(sequence, q, indices, want_lse=True, batch_invariant=True)
        asked = [
            s.attend(
                sequence, q[t : t + 1], indices[t : t + 1], want_lse=True, batch_invariant=True, wait=False
            )
            for t in range(40)
        ]
        for t, request in enumerate(asked):
            alone = s.stream.wait(request)
            same_bits(alone.out_bits, together.out_bits[t : t + 1], "row %d" % t)
            same_bits(alone.lse, together.lse[t : t + 1], "lse of row %d" % t)


# ---- poison (DSA-03 through the service) ----


def poison(n):
    """Rows of NaN: byte 0x7f in the latent, NaN scales, NaN RoPE."""
    rows = np.full((n, 656), 0x7F, np.uint8)
    rows[:, 512:528] = np.frombuffer(np.full(4, 0x7FC00000, np.uint32).tobytes(), np.uint8)
    rows[:, 528:] = np.frombuffer(np.full(64, 0x7FC1, np.uint16).tobytes(), np.uint8)
    return rows


def attend_all_shapes(s, sequence, n, rng):
    """A set of requests with holes in every place; their bits."""
    bits = []
    for heads, width in ((1, 65), (16, 128), (7, 200)):
        q = random_q(rng, 6, heads)
        indices = np.full((6, width), -1, np.int32)
        indices[0, -1] = n - 1
        indices[1, 0] = n // 2
        indices[2, ::2] = rng.integers(0, n, len(indices[2, ::2]))
        indices[3, 33:50] = rng.integers(0, n, 17)
        indices[4] = rng.integers(0, n + 70, width)  # some past the end: page tail and beyond
        lengths = np.array([width, width, width, width, width, 0], np.int32)
        for given in ({}, {"lengths": lengths}):
            result = s.attend(sequence, q, indices, want_lse=True, **given)
            truth(np.isfinite(result.out).all(), "NaN in the result")
            bits.append((result.out_bits.copy(), result.lse.copy()))
    return bits


@test(**{"pool-pages": 16, "layers": 1, "physical-indices": "true"})
def poison_is_never_read(server, rng):
    """NaN in slot 0, in every free page, in page tails and in other sequences: bit for bit the clean result."""
    seed = int(rng.integers(1 << 30))
    rows = random_rows(rng, 100)
    with server.session() as s:
        clean = s.create()
        s.append(clean, rows)
        expected = attend_all_shapes(s, clean, 100, np.random.default_rng(seed))
    with server.session() as s:
        filler = s.create()
        s.import_rows(filler, poison(16 * 64))  # every slot of the pool, slot 0 included
        equal(server.control.pool().n_pages_free, 0, "the poison fills the pool")
        equal(sorted(s.get(filler).page_ids), list(range(16)), "every page is poisoned")
        s.truncate(filler, 64 * 13)  # three pages go back, still poisoned inside
        sequence = s.create()
        s.append(sequence, rows)  # two pages: the second one's tail is poison
        for n, (got, want) in enumerate(
            zip(attend_all_shapes(s, sequence, 100, np.random.default_rng(seed)), expected)
        ):
            same_bits(got[0], want[0], "request %d, out" % n)
            same_bits(got[1], want[1], "request %d, lse" % n)
        same_bits(s.export(filler)[0], poison(1)[0], "slot of the first page is as it was")
        held = set(s.get(sequence).page_ids) | set(s.get(filler).page_ids)
        slots = np.array([-1] * 64 + [int(p) * 64 + 5 for p in s.get(sequence).page_ids[:1]], np.int32)[
            None, :
        ]
        q = random_q(np.random.default_rng(seed), 1, 4)
        by_slot = s.attend([(0, 1)], q, slots, space=pb.INDEX_SPACE_PHYSICAL, want_lse=True)
        by_position = s.attend(sequence, q, np.array([[-1] * 64 + [5]], np.int32), want_lse=True)
        same_bits(by_slot.out_bits, by_position.out_bits, "one slot among holes")
        truth(len(held) == 15, "pages held %r" % held)


# ---- steps without rows ----


def only_reply(stream, op):
    """The raw reply to a request that is alone on its stream."""
    request_id = stream.send(attend=op)
    reply = stream.bidi.recv(30 * SLOW)
    equal(reply.request_id, request_id)
    return reply


@test()
def a_step_without_rows_is_answered_at_once(server, rng):
    """GRAPH-02: no rows: OK, empty, and nothing is launched. Empty segments among others are passed over."""
    scalars = {"softmax_scale": 0.05, "space": pb.INDEX_SPACE_LOGICAL}
    with server.session() as s:
        sequence = s.create()
        s.append(sequence, random_rows(rng, 20))
        kv = s.export(sequence, dtype=pb.DTYPE_BF16)
        launches = server.control.stats().n_batches
        empty_q = pb.Tensor(dtype=pb.DTYPE_BF16, shape=[0, 8, MAIN.d_qk])
        empty_segments = [pb.Segment(sequence_id=sequence)] * 3
        for op in (
            pb.AttendOp(**scalars),
            pb.AttendOp(segments=empty_segments, q=empty_q, want_lse=True, **scalars),
        ):
            reply = only_reply(s.stream, op)
            truth(reply.last and not reply.HasField("status"), "answered: %s" % reply)
            equal((reply.n_rows, reply.out, reply.lse), (0, b"", b""))
        equal(server.control.stats().n_batches, launches, "launches")

        q, indices = random_q(rng, 3, 8), random_indices(rng, 3, 16, 20)
        result = s.attend([(sequence, 0), (sequence, 1), (sequence, 0), (sequence, 2)], q, indices)
        check_attend(result, *attend_reference(MAIN, q, kv, indices, 0.05), "between empty ones")

        tensors = {"q": inline(q), "indices": inline(indices), "lengths": inline(np.zeros(3, np.int32))}
        for name, tensor in tensors.items():
            status = only_reply(s.stream, pb.AttendOp(**{name: tensor}, **scalars)).status
            equal((status.reason, status.field), ("BAD_SHAPE", "attend.%s.shape[0]" % name))
        equal(only_reply(s.stream, pb.AttendOp()).status.field, "attend.softmax_scale", "scalars count")

        more = pb.AppendOp(sequence_id=sequence, rows=inline(random_rows(rng, 5)))
        reply = only_reply(s.stream, pb.AttendOp(append=more, **scalars))
        truth(reply.last and not reply.HasField("status"), "appended: %s" % reply)
        equal((reply.n_rows, reply.n_tokens), (0, 25), "its append is done")
        more.layer = 99
        reply = only_reply(s.stream, pb.AttendOp(append=more, **scalars))
        equal(reply.status.field, "attend.append.layer")


if __name__ == "__main__":
    main()
