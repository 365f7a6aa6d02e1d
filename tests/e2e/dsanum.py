"""dsanum.py - the formats and attention in numpy and float64, written from their description alone."""

from dsabase import *  # noqa: F403


class Layout:
    def __init__(self, number, name, row_bytes, latent, rope, d_v, kind):
        self.number, self.name, self.row_bytes = number, name, row_bytes
        self.latent, self.rope, self.d_v, self.kind = latent, rope, d_v, kind
        self.d_qk = latent + rope


LAYOUTS = [
    Layout(1, "scaled_512_64", 656, 512, 64, 512, "scaled"),
    Layout(2, "scaled_512_0", 528, 512, 0, 512, "scaled"),
    Layout(3, "scaled_256_0", 264, 256, 0, 256, "scaled"),
    Layout(4, "bf16_576", 1152, 512, 64, 512, "bf16"),
    Layout(5, "bf16_512", 1024, 512, 0, 512, "bf16"),
    Layout(6, "bf16_256", 512, 256, 0, 256, "bf16"),
    Layout(7, "raw_512_64", 576, 512, 64, 512, "raw"),
]
LAYOUT = {x.name: x for x in LAYOUTS}
MAIN = LAYOUT["scaled_512_64"]
PAGE = 64


def bf16(values):
    """Nearest even, as uint16. NaN stays NaN."""
    f = np.ascontiguousarray(values, np.float32)
    bits = f.view(np.uint32).astype(np.uint64)
    out = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(f), np.uint16(0x7FC0), out).reshape(np.shape(values))


def f32(bits):
    return (np.ascontiguousarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def _e4m3_values():
    """The 128 non-negative codes of OCP e4m3fn; 0x7f is NaN."""
    values = []
    for code in range(128):
        exponent, mantissa = code >> 3, code & 7
        values.append(mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    values[127] = float("nan")
    return np.array(values, np.float32)


E4M3 = np.concatenate([_e4m3_values(), -_e4m3_values()])


def e4m3(values):
    """Nearest code, ties to the even code, saturating at 448; -0 stays 0x80."""
    v = np.asarray(values, np.float32)
    finite = E4M3[:127].astype(np.float64)
    a = np.minimum(np.abs(v).astype(np.float64), 448.0)
    above = np.clip(np.searchsorted(finite, a), 1, 126)
    low, high = finite[above - 1], finite[above]
    below = above - 1
    code = np.where(a - low < high - a, below, above)
    code = np.where(a - low == high - a, np.where(below % 2 == 0, below, above), code)
    code = np.where(a == 0, 0, code)
    return (code | np.where(np.signbit(v), 0x80, 0)).astype(np.uint8)


POW2, PLAIN = "pow2", "plain"


def quantize(layout, rows, rule=POW2, raw_scale=1.0):
    """Stored bytes [n, row_bytes] of bf16 rows [n, d_qk] (uint16), and the count of non-finite values."""
    rows = np.ascontiguousarray(rows, np.uint16)
    n = len(rows)
    if layout.kind == "bf16":
        return rows.view(np.uint8).reshape(n, layout.row_bytes), int((~np.isfinite(f32(rows))).sum())
    width = layout.latent if layout.kind == "scaled" else layout.d_qk
    x = f32(rows[:, :width])
    n_bad = int((~np.isfinite(x)).sum())
    finite = np.where(np.isfinite(x), x, 0).astype(np.float32)
    if layout.kind == "raw":
        scale = np.full((n, 1), raw_scale, np.float32)
        groups = 1
    else:
        groups = layout.latent // 128
        amax = np.abs(finite).reshape(n, groups, 128).max(-1)
        if rule == PLAIN:
            scale = np.maximum((amax / np.float32(448)).astype(np.float32), np.float32(2.0**-126))
        else:
            floor = np.maximum((amax / np.float32(448)).astype(np.float32), np.float32(1e-4))
            mantissa, exponent = np.frexp(floor.astype(np.float64))
            scale = np.ldexp(1.0, np.where(mantissa == 0.5, exponent - 1, exponent)).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        ratio = (x.reshape(n, groups, -1) / scale[:, :, None]).astype(np.float32).reshape(n, width)
    codes = e4m3(np.where(np.isnan(ratio), 0, ratio))
    codes = np.where(np.isnan(x), 0, codes).astype(np.uint8)
    if layout.kind == "raw":
        return codes, n_bad
    rope = rows[:, layout.latent :]
    n_bad += int((~np.isfinite(f32(rope))).sum())
    parts = [codes, scale.astype("<f4").view(np.uint8).reshape(n, -1)]
    if layout.rope:
        parts.append(np.ascontiguousarray(rope).view(np.uint8).reshape(n, -1))
    return np.concatenate(parts, axis=1), n_bad


def dequantize(layout, stored, raw_scale=1.0):
    """bf16 [n, d_qk] (uint16) of stored rows."""
    stored = np.ascontiguousarray(stored, np.uint8).reshape(-1, layout.row_bytes)
    n = len(stored)
    if layout.kind == "bf16":
        return stored.view(np.uint16).reshape(n, layout.d_qk)
    if layout.kind == "raw":
        return bf16(E4M3[stored] * np.float32(raw_scale))
    groups = layout.latent // 128
    scale = np.ascontiguousarray(stored[:, layout.latent : layout.latent + 4 * groups]).view("<f4")
    codes = E4M3[stored[:, : layout.latent]].reshape(n, groups, 128)
    with np.errstate(invalid="ignore"):
        latent = bf16((codes * scale[:, :, None]).astype(np.float32).reshape(n, layout.latent))
    if not layout.rope:
        return latent
    rope = np.ascontiguousarray(stored[:, layout.latent + 4 * groups :]).view(np.uint16)
    return np.concatenate([latent, rope], axis=1)


def attend_reference(layout, q, kv, indices, scale, lengths=None, sink=None, n_tokens=None):
    """float64. q [s, h, d] and kv [n, d] as bf16 bits; kv may be a list, one array per row. Returns (out, lse)."""
    s, h, _ = q.shape
    out, lse = np.zeros((s, h, layout.d_v)), np.full((s, h), -np.inf)
    queries = f32(q).astype(np.float64).reshape(q.shape)
    for t in range(s):
        rows = kv[t] if isinstance(kv, list) else kv
        limit = len(rows) if n_tokens is None else n_tokens
        lanes = indices[t][: max(0, lengths[t])] if lengths is not None else indices[t]
        lanes = lanes[(lanes >= 0) & (lanes < limit)]
        if len(lanes) == 0:
            continue
        keys = f32(rows[lanes]).astype(np.float64).reshape(len(lanes), -1)
        score = float(np.float32(scale)) * queries[t] @ keys.T
        peak = score.max(-1, keepdims=True)
        lse[t] = (peak + np.log(np.exp(score - peak).sum(-1, keepdims=True)))[:, 0]
        out[t] = np.exp(score - lse[t][:, None]) @ keys[:, : layout.d_v]
        if sink is not None:
            with np.errstate(over="ignore"):
                out[t] *= (1 / (1 + np.exp(sink.astype(np.float64) - lse[t])))[:, None]
    return out, lse


def check_attend(result, out_ref, lse_ref=None, what=""):
    """The stated tolerances: |err| <= 1e-3 + 2.01/128 |ref| and cosine 5e-6; lse 1e-6 + 8.01/65536 |ref|."""
    out = result.out.astype(np.float64)
    equal(out.shape, out_ref.shape, what + " out shape")
    bad = ~(np.abs(out - out_ref) <= 1e-3 + 2.01 / 128 * np.abs(out_ref))
    if bad.any():
        at = tuple(np.argwhere(bad)[0])
        fail(
            "%s out%s = %r, expected %r; %d of %d differ"
            % (what, at, out[at], out_ref[at], bad.sum(), bad.size)
        )
    norm = np.linalg.norm(out) * np.linalg.norm(out_ref)
    if norm > 0:
        distance = 1 - float((out * out_ref).sum() / norm)
        truth(distance <= 5e-6, "%s cosine distance %g" % (what, distance))
    empty = np.isneginf(lse_ref) if lse_ref is not None else None
    if lse_ref is None or result.lse is None:
        return
    lse = result.lse.astype(np.float64)
    truth((np.isneginf(lse) == empty).all(), "%s lse is -inf at other places than expected: %r" % (what, lse))
    with np.errstate(invalid="ignore"):
        wrong = ~empty & ~(np.abs(lse - lse_ref) <= 1e-6 + 8.01 / 65536 * np.abs(lse_ref))
    truth(not wrong.any(), "%s lse %r, expected %r" % (what, lse[wrong][:3], lse_ref[wrong][:3]))
    zero = result.out_bits[empty]
    truth((zero == 0).all(), "%s rows without entries are not +0" % what)
