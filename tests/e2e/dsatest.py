"""dsatest.py - harness of the end-to-end tests: an independent client of dsad, and a runner.

Nothing here shares code with the server or with libdsa: the stubs are generated from proto/ when the tests start,
and the reference arithmetic is numpy, written from the format's description alone.

A test is a function marked with @test(...); the runner starts the dsad that it asks for, runs it, and then checks
that nothing stayed behind (pages, sequences, regions, sessions), that the server still answers, that its log has no
error line which the test did not announce, and that it leaves with exit code 0. No test sleeps for a fixed time in
order to synchronise: wait_until polls against a deadline.
"""

import argparse
import array
import fcntl
import importlib.util
import itertools
import mmap
import os
import queue
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import zlib

sys.dont_write_bytecode = True

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
SANITIZED = os.environ.get("DSA_SANITIZED", "") not in ("", "0")
SLOW = 8 if SANITIZED else 1  # what an instrumented server takes longer


def skip_program(reason):
    print("SKIP %s: %s" % (os.path.basename(sys.argv[0]), reason))
    print("0 passed, 0 failed, 1 skipped")
    sys.stdout.flush()
    os._exit(0)


try:
    import grpc
    import numpy as np
    import google.protobuf.message  # noqa: F401
except ImportError as missing:
    skip_program("needs python3-grpcio, python3-protobuf and python3-numpy (%s)" % missing)


def scaled(n, least=1):
    """A loop count, smaller when the server is instrumented."""
    return max(least, n // (10 if SANITIZED else 1))


# ---- stubs ----


def _load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _build_stubs():
    """protoc writes into a temporary folder; files are loaded by path, as their package "grpc" clashes."""
    out = tempfile.mkdtemp(prefix="dsa-stubs-")
    protos = [
        "dsa/v1/dsa.proto",
        "google/rpc/status.proto",
        "grpc/health/v1/health.proto",
        "grpc/reflection/v1/reflection.proto",
        "grpc/reflection/v1alpha/reflection.proto",
    ]
    command = [
        "protoc",
        "--python_out=" + out,
        "-I",
        os.path.join(ROOT, "proto"),
        "-I",
        "/usr/share/grpc-proto",
        "-I",
        "/usr/include",
    ] + protos
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as failed:
        skip_program("cannot generate stubs: %s %s" % (failed, getattr(failed, "stderr", "")))
    modules = [
        _load("dsa_e2e_" + re.sub(r"\W", "_", p[:-6]), os.path.join(out, p[:-6] + "_pb2.py")) for p in protos
    ]
    subprocess.run(["rm", "-rf", out], check=False)
    return modules


pb, rpc_status_pb, health_pb, reflection_v1, reflection_v1alpha = _build_stubs()
SERVICE = "dsa.v1.SparseAttention"


def message_class(descriptor):
    return getattr(pb, descriptor.name)


METHODS = {
    m.name: (message_class(m.input_type), message_class(m.output_type))
    for m in pb.DESCRIPTOR.services_by_name["SparseAttention"].methods
}
CLIENT_STREAMS = {"OpenSession", "Attend"}
SERVER_STREAMS = {"OpenSession", "Attend", "ExportRows"}

# ---- numbers: the formats, from their description ----


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


# ---- checks ----


class Failure(AssertionError):
    pass


class Skip(Exception):
    pass


def fail(text):
    raise Failure(text)


def truth(condition, text):
    if not condition:
        fail(text)


def equal(got, expected, what="value"):
    if got != expected:
        fail("%s is %r, expected %r" % (what, got, expected))


def same_bits(got, expected, what):
    if got.shape != expected.shape:
        fail("%s has the shape %r, expected %r" % (what, got.shape, expected.shape))
    if not np.array_equal(got, expected):
        bad = np.argwhere(got != expected)
        at = tuple(bad[0])
        fail("%s differs at %r: %r, expected %r (%d places)" % (what, at, got[at], expected[at], len(bad)))


def wait_until(condition, timeout, what):
    """Polls until the condition is true; fails with `what` when the deadline passes first."""
    end = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            fail("after %.1f s still not: %s" % (timeout, what))
        time.sleep(0.005)  # poll interval; the deadline above ends it


class Refused(Exception):
    """A dsa.v1.Status that is not OK, from a unary call's trailer or from a reply."""

    def __init__(self, status, code=None, details=""):
        super().__init__("%s %s=%s: %s" % (status.reason, status.field, status.value, status.message))
        self.status, self.code, self.details = status, code, details


def refused_from(error):
    """The dsa.v1.Status in grpc-status-details-bin; None when the server's transport layer answered."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            envelope = rpc_status_pb.Status.FromString(value)
            status = pb.Status()
            truth(
                len(envelope.details) == 1 and envelope.details[0].Unpack(status),
                "details are not a dsa.v1.Status",
            )
            equal(envelope.code, error.code().value[0], "google.rpc.Status.code")
            return Refused(status, error.code(), error.details())
    return None


def expect_refusal(call, reason, field=None, value=None, code=None):
    """Runs `call`; it must be refused with this reason, and field and value must be named. Returns the status."""
    try:
        result = call()
    except grpc.RpcError as error:
        refused = refused_from(error)
        if refused is None:
            fail("refused by the transport, without a status: %s %s" % (error.code(), error.details()))
    except Refused as error:
        refused = error
    else:
        fail("accepted, expected %s on %s; got %r" % (reason, field, result))
    status = refused.status
    reasons = (reason,) if isinstance(reason, str) else reason
    truth(status.reason in reasons, "reason %r (%s), expected %r" % (status.reason, refused, reasons))
    truth(status.code != 0 and status.message != "" and status.scope != 0, "incomplete status %r" % status)
    if field is not None:
        truth(status.field == field, "field %r (%s), expected %r" % (status.field, refused, field))
    if value is not None:
        truth(str(value) in status.value, "value %r does not name %r (%s)" % (status.value, value, refused))
    if code is not None:
        equal(status.code, code.value[0], "code of %s" % refused)
    if refused.code is not None:  # unary: the plain message says as much as the details
        equal(refused.code.value[0], status.code, "gRPC code")
        for part in (status.field, status.value):
            truth(part in refused.details, "the message %r does not name %r" % (refused.details, part))
    return status


# ---- client ----


def serialize(message):
    return message if isinstance(message, bytes) else message.SerializeToString()


class Bidi:
    """A stream with a reader thread. recv returns a message, None at a clean end, or raises the RpcError."""

    def __init__(self, channel, method, reply_class, reads=True):
        self.requests = queue.SimpleQueue()
        self.replies = queue.SimpleQueue()
        multi = channel.stream_stream(
            method, request_serializer=serialize, response_deserializer=reply_class.FromString
        )
        self.call = multi(iter(self.requests.get, None))
        self.error = None
        if reads:
            self.start_reading()

    def start_reading(self):
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        try:
            for message in self.call:
                self.replies.put(message)
        except grpc.RpcError as error:
            self.error = error
        self.replies.put(None)

    def send(self, message):
        self.requests.put(message)

    def half_close(self):
        self.requests.put(None)

    def recv(self, timeout=20 * SLOW):
        try:
            message = self.replies.get(timeout=timeout)
        except queue.Empty:
            fail("no message within %d s" % timeout)
        if message is None:
            self.replies.put(None)
            if self.error is not None:
                raise self.error
        return message

    def cancel(self):
        self.call.cancel()
        self.requests.put(None)


class Client:
    """One connection of its own."""

    def __init__(self, target):
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.enable_retries", 0),
        ]
        self.target = target
        self.channel = grpc.insecure_channel(target, options=options)

    def call(self, name, request=None, timeout=20 * SLOW, service=SERVICE, reply_class=None, **fields):
        """A unary call; request may be bytes."""
        if reply_class is None:
            request_class, reply_class = METHODS[name]
            if request is None:
                request = request_class(**fields)
        method = self.channel.unary_unary(
            "/%s/%s" % (service, name),
            request_serializer=serialize,
            response_deserializer=reply_class.FromString,
        )
        return method(request, timeout=timeout)

    def export(self, request, timeout=60 * SLOW):
        method = self.channel.unary_stream(
            "/%s/ExportRows" % SERVICE,
            request_serializer=serialize,
            response_deserializer=pb.RowChunk.FromString,
        )
        return method(request, timeout=timeout)

    def bidi(self, name, service=SERVICE, reply_class=None, reads=True):
        return Bidi(self.channel, "/%s/%s" % (service, name), reply_class or METHODS[name][1], reads)

    def stats(self, timeout=20 * SLOW):
        return self.call("GetStats", timeout=timeout)

    def pool(self):
        return self.stats().pools[0]

    def health(self, service="", timeout=10 * SLOW):
        return self.call(
            "Check",
            health_pb.HealthCheckRequest(service=service),
            service="grpc.health.v1.Health",
            reply_class=health_pb.HealthCheckResponse,
            timeout=timeout,
        )

    def close(self):
        self.channel.close()


class FdSocket:
    """The socket that takes descriptors: one offer with one fd, one answer."""

    OFFER, ANSWER, MAGIC = "=II16sQ", "=QiI112s", 0x44534146

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(20 * SLOW)
        self.socket.connect(path)

    def send(self, data, fds=()):
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.socket.sendmsg([data], rights)

    def answer(self):
        data = self.socket.recv(4096)
        if not data:
            return None
        truth(len(data) == struct.calcsize(self.ANSWER), "an answer of %d bytes" % len(data))
        ticket, status, _, text = struct.unpack(self.ANSWER, data)
        return ticket, status, text.rstrip(b"\0").decode()

    def offer(self, token, ticket, fds, magic=MAGIC, version=1):
        self.send(struct.pack(self.OFFER, magic, version, token, ticket), fds)
        return self.answer()

    def close(self):
        self.socket.close()


class Session:
    """A lease and what can be done under it."""

    def __init__(self, client, name="e2e", lease_us=60000000, grace_us=0, token=b"", attend=True):
        self.client = client
        self.lease = client.bidi("OpenSession")
        opening = pb.SessionOpen(client_name=name, lease_us=lease_us, grace_us=grace_us, reattach_token=token)
        self.lease.send(pb.SessionRequest(open=opening))
        event = self.lease.recv()
        if event is None or event.WhichOneof("kind") != "opened":
            fail("the session answered %r instead of `opened`" % event)
        self.opened = event.opened
        self.token = self.opened.token
        self.fds = None
        self.tickets = itertools.count(1)
        self._stream = None

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            self.close()
        else:
            self.abandon()

    def call(self, name, **fields):
        return self.client.call(name, session=self.token, **fields)

    def create(self):
        return self.call("CreateSequence").id

    def append(self, sequence, rows, layer=0, **fields):
        tensor = rows if isinstance(rows, pb.Tensor) else inline(rows)
        return self.call(
            "Append", append=pb.AppendOp(sequence_id=sequence, layer=layer, rows=tensor, **fields)
        )

    def import_rows(self, sequence, stored, layer=0, layout=MAIN, **fields):
        tensor = stored if isinstance(stored, pb.Tensor) else inline(stored)
        return self.call(
            "ImportRows", sequence_id=sequence, layer=layer, layout=layout.number, rows=tensor, **fields
        )

    def export(self, sequence, layer=0, dtype=pb.DTYPE_U8, first=0, n_tokens=0, layout=MAIN):
        """[n, row_bytes] uint8 or [n, d_qk] bf16 bits; checks that the chunks follow one another."""
        request = pb.ExportRowsRequest(
            session=self.token, sequence_id=sequence, layer=layer, first=first, n_tokens=n_tokens, dtype=dtype
        )
        parts, at = [], first
        for chunk in self.client.export(request):
            equal(chunk.first, at, "first token of a chunk")
            equal(chunk.layout, layout.number, "layout of a chunk")
            at += chunk.n_tokens
            parts.append(chunk.rows)
        data = b"".join(parts)
        if dtype == pb.DTYPE_BF16:
            rows = np.frombuffer(data, np.uint16).reshape(-1, layout.d_qk)
        else:
            rows = np.frombuffer(data, np.uint8).reshape(-1, layout.row_bytes)
        equal(len(rows), at - first, "rows exported")
        return rows

    def fork(self, sequence, n_tokens=0):
        return self.call("ForkSequence", sequence_id=sequence, n_tokens=n_tokens)

    def truncate(self, sequence, n_tokens):
        return self.call("TruncateSequence", sequence_id=sequence, n_tokens=n_tokens)

    def release(self, sequence):
        return self.call("ReleaseSequence", sequence_id=sequence)

    def get(self, sequence):
        return self.call("GetSequence", sequence_id=sequence)

    def region(self, size, **options):
        return Region(self, size, **options)

    def fd_socket(self):
        if self.fds is None:
            self.fds = FdSocket(self.opened.fd_socket)
        return self.fds

    def offer(self, fd):
        """Sends a descriptor; returns its ticket."""
        ticket = next(self.tickets)
        answer = self.fd_socket().offer(self.token, ticket, [fd])
        equal(answer[:2], (ticket, 0), "answer to an fd offer (%r)" % (answer,))
        return ticket

    @property
    def stream(self):
        """The session's Attend stream, opened when it is first used."""
        if self._stream is None:
            self._stream = AttendStream(self)
        return self._stream

    def attend(self, *args, **fields):
        return self.stream.attend(*args, **fields)

    def close(self):
        """Half-closes: everything is given back at once."""
        if self._stream is not None:
            self._stream.close()
        if self.fds is not None:
            self.fds.close()
        self.lease.half_close()
        while self.lease.recv() is not None:
            pass

    def abandon(self):
        if self._stream is not None:
            self._stream.bidi.cancel()
        if self.fds is not None:
            self.fds.close()
        self.lease.cancel()


class Region:
    """A sealed memfd, mapped here and registered there."""

    def __init__(
        self,
        session,
        size,
        access=pb.REGION_ACCESS_READ_WRITE,
        base_offset=0,
        file_size=None,
        seals=fcntl.F_SEAL_SHRINK,
    ):
        self.session, self.size = session, size
        fd = os.memfd_create("dsa-e2e", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        os.ftruncate(fd, file_size if file_size is not None else base_offset + size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        self.map = mmap.mmap(fd, 0)
        self.bytes = np.frombuffer(self.map, np.uint8)[base_offset : base_offset + size]
        ticket = session.offer(fd)
        os.close(fd)
        self.reply = session.call(
            "RegisterRegion",
            memfd=pb.MemfdRegion(fd_ticket=ticket),
            access=access,
            base_offset=base_offset,
            size=size,
        )
        self.id = self.reply.id
        equal(len(self.id), 16, "bytes of a region id")

    def slice(self, offset=0):
        return pb.RegionSlice(region_id=self.id, offset=offset)

    def view(self, dtype, shape, offset=0):
        n = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.bytes[offset : offset + n].view(dtype).reshape(shape)

    def put(self, values, offset=0, strides=None):
        """Writes the values and returns their tensor. With strides (bytes), they are written so."""
        values = np.ascontiguousarray(values)
        if strides is None:
            self.view(values.dtype, values.shape, offset)[...] = values
        else:
            target = np.lib.stride_tricks.as_strided(
                self.bytes[offset:].view(np.uint8)[: values.itemsize].view(values.dtype),
                values.shape,
                strides,
            )
            target[...] = values
        return pb.Tensor(
            dtype=DTYPES[values.dtype],
            shape=values.shape,
            strides_bytes=strides or (),
            region=self.slice(offset),
        )

    def unregister(self):
        return self.session.call("UnregisterRegion", region_id=self.id).state


DTYPES = {
    np.dtype(np.uint16): pb.DTYPE_BF16,
    np.dtype(np.float32): pb.DTYPE_F32,
    np.dtype(np.int32): pb.DTYPE_I32,
    np.dtype(np.uint8): pb.DTYPE_U8,
}


def inline(values):
    values = np.ascontiguousarray(values)
    return pb.Tensor(dtype=DTYPES[values.dtype], shape=values.shape, inline=values.tobytes())


class Result:
    """The pieces of one answer put together."""

    def __init__(self, pieces, layout, heads, out_f32):
        self.pieces, self.last = pieces, pieces[-1]
        row = 0
        for piece in pieces:
            equal(piece.row_begin, row, "first row of a piece")
            row += piece.n_rows
        self.n_rows = row
        self.n_invalid = sum(p.n_invalid for p in pieces)
        self.n_nonfinite = sum(p.n_nonfinite for p in pieces)
        self.n_tokens = self.last.n_tokens
        out, lse = b"".join(p.out for p in pieces), b"".join(p.lse for p in pieces)
        self.out = self.out_bits = self.lse = None
        if out:
            self.out_bits = np.frombuffer(out, np.uint32 if out_f32 else np.uint16).reshape(
                row, heads, layout.d_v
            )
            self.out = (
                self.out_bits.view(np.float32) if out_f32 else f32(self.out_bits).reshape(self.out_bits.shape)
            )
        if lse:
            self.lse = np.frombuffer(lse, np.float32).reshape(row, heads)


class AttendStream:
    def __init__(self, session, layout=None, reads=True):
        self.session = session
        self.layout = layout or MAIN
        self.bidi = session.client.bidi("Attend", reads=reads)
        self.ids = itertools.count(1)
        self.pieces, self.shapes = {}, {}
        self.is_first = True

    def send(self, request_id=None, token=None, **fields):
        """Sends one AttendRequest; returns its id."""
        request_id = next(self.ids) if request_id is None else request_id
        if token is None:
            token = self.session.token if self.is_first else b""
        self.is_first = False
        self.bidi.send(pb.AttendRequest(session=token, request_id=request_id, **fields))
        return request_id

    def start(self, op, **fields):
        request_id = self.send(attend=op, **fields)
        heads = op.q.shape[1] if len(op.q.shape) == 3 else 0
        self.shapes[request_id] = (heads, op.out.dtype == pb.DTYPE_F32)
        return request_id

    def wait(self, request_id, timeout=30 * SLOW, layout=None):
        """The Result; raises Refused when the answer carries a status."""
        end = time.monotonic() + timeout
        while True:
            mine = self.pieces.get(request_id, [])
            if mine and mine[-1].last:
                break
            piece = self.bidi.recv(max(0.001, end - time.monotonic()))
            truth(piece is not None, "the stream ended before request %d was answered" % request_id)
            self.pieces.setdefault(piece.request_id, []).append(piece)
        del self.pieces[request_id]
        heads, out_f32 = self.shapes.pop(request_id, (0, False))
        if mine[-1].HasField("status"):
            raise Refused(mine[-1].status)
        return Result(mine, layout or self.layout, heads, out_f32)

    def attend(
        self, segments, q, indices, scale=0.05, wait=True, deadline_us=0, priority=0, layout=None, **fields
    ):
        op = attend_op(segments, q, indices, scale, **fields)
        request_id = self.start(op, deadline_us=deadline_us, priority=priority)
        return self.wait(request_id, layout=layout) if wait else request_id

    def append(self, sequence, rows, layer=0, wait=True, **fields):
        tensor = rows if isinstance(rows, pb.Tensor) else inline(rows)
        request_id = self.send(append=pb.AppendOp(sequence_id=sequence, layer=layer, rows=tensor, **fields))
        return self.wait(request_id) if wait else request_id

    def wait_until_read(self):
        """Returns when the server has taken everything sent so far: a request that it refuses at once comes last."""
        marker = self.send(append=pb.AppendOp())
        expect_refusal(lambda: self.wait(marker), "NOT_FOUND")

    def cancel_request(self, target):
        self.send(cancel=pb.CancelOp(target_request_id=target))

    def close(self):
        self.bidi.half_close()
        while self.bidi.recv() is not None:
            pass


def attend_op(
    segments, q, indices, scale=0.05, space=pb.INDEX_SPACE_LOGICAL, lengths=None, sink=None, **fields
):
    """segments: a sequence id, or [(id, rows)...]; arrays or ready tensors."""
    tensors = {"q": q, "indices": indices, "lengths": lengths, "sink": sink}
    tensors = {k: v if isinstance(v, pb.Tensor) else inline(v) for k, v in tensors.items() if v is not None}
    if not isinstance(segments, (list, tuple)):
        segments = [(segments, tensors["q"].shape[0])]
    op = pb.AttendOp(
        segments=[pb.Segment(sequence_id=i, n_rows=n) for i, n in segments], space=space, **tensors, **fields
    )
    if scale is not None:
        op.softmax_scale = scale
    return op


def random_rows(rng, n, layout=MAIN, spread=1.0):
    return bf16(rng.standard_normal((n, layout.d_qk)).astype(np.float32) * spread)


def random_q(rng, rows, heads, layout=MAIN):
    return bf16(rng.standard_normal((rows, heads, layout.d_qk)).astype(np.float32))


def random_indices(rng, rows, width, n, holes=0.2):
    indices = rng.integers(0, n, (rows, width)).astype(np.int32)
    indices[rng.random((rows, width)) < holes] = -1
    return indices


# ---- server ----

SANITIZER_REPORT = re.compile(
    r"ERROR: (Address|Leak)Sanitizer|WARNING: ThreadSanitizer|runtime error:|SUMMARY: \w+San"
)
ERROR_LINE = re.compile(r"^\S+Z error |^E\d{4} ", re.M)


class Server:
    """A dsad on a unix socket in a temporary folder. `flags` replace the defaults by name."""

    DEFAULTS = {"layers": "1", "pool-pages": "256", "cpu-threads": "2", "max-lease": "600s"}

    def __init__(self, env, folder=None, nofile=None, wrapper=(), **flags):
        self.env = env
        self.folder = folder or tempfile.mkdtemp(prefix="dsa-e2e-")
        self.path = os.path.join(self.folder, "d.sock")
        self.log_path = os.path.join(self.folder, "log.%d" % time.monotonic_ns())
        self.expected_errors = []
        options = {"listen": "unix:" + self.path, **self.DEFAULTS}
        options.update({k.replace("_", "-"): str(v) for k, v in flags.items()})
        command = [*wrapper, env.dsad] + [x for k, v in options.items() for x in ("--" + k, v)]
        command = [x for x in command if x != "true"] if "true" in command else command
        self.log = open(self.log_path, "wb")

        def limit():
            if nofile:
                resource.setrlimit(resource.RLIMIT_NOFILE, (nofile, nofile))

        environment = dict(os.environ)
        environment.setdefault(
            "TSAN_OPTIONS", "suppressions=%s:exitcode=66" % os.path.join(ROOT, "tests", "tsan.supp")
        )
        self.process = subprocess.Popen(
            command,
            stdout=self.log,
            stderr=self.log,
            stdin=subprocess.DEVNULL,
            preexec_fn=limit,
            close_fds=True,
            env=environment,
        )
        env.servers.append(self)
        self.control = None

    def wait_ready(self):
        def answers():
            if self.process.poll() is not None:
                fail("dsad ended at start with code %d:\n%s" % (self.process.returncode, self.text()))
            probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                probe.connect(self.path)
                return True
            except OSError:
                return False
            finally:
                probe.close()

        wait_until(answers, 10 * SLOW, "dsad listens")
        self.control = self.client()
        self.capabilities = self.control.call("GetCapabilities")
        return self

    def client(self):
        return Client("unix:" + self.path)

    def session(self, **options):
        return Session(self.client(), **options)

    def text(self):
        self.log.flush()
        with open(self.log_path, errors="replace") as f:
            return f.read()

    def expect_error(self, pattern):
        """Announces error lines that this test causes."""
        self.expected_errors.append(re.compile(pattern))

    def check_log(self):
        text = self.text()
        report = SANITIZER_REPORT.search(text)
        if report:
            fail("sanitizer report:\n" + text[max(0, report.start() - 200) : report.start() + 6000])
        for line in text.splitlines():
            if ERROR_LINE.match(line) and not any(p.search(line) for p in self.expected_errors):
                fail("unexpected error line: " + line)

    def rss(self):
        with open("/proc/%d/statm" % self.process.pid) as f:
            return int(f.read().split()[1]) * mmap.PAGESIZE

    def n_fds(self):
        return len(os.listdir("/proc/%d/fd" % self.process.pid))

    def n_maps(self):
        with open("/proc/%d/maps" % self.process.pid) as f:
            return sum(1 for _ in f)

    def is_empty(self):
        stats = self.control.stats()
        pool = stats.pools[0]
        return (
            stats.n_sessions,
            stats.n_regions,
            stats.region_bytes,
            pool.n_pages_used,
            pool.n_sequences,
            pool.queue_depth,
            pool.page_refs,
            pool.n_pages_shared,
        ) == (0,) * 8

    def expect_empty(self, timeout=1.0 * SLOW):
        try:
            wait_until(self.is_empty, timeout, "all is back in the pool")
        except Failure as failed:
            fail("%s; stats: %r" % (failed, self.control.stats()))
        pool = self.control.pool()
        equal(pool.n_pages_free, pool.n_pages, "free pages")

    def expect_working(self):
        """A whole round through a session of its own gives the right numbers."""
        rng = np.random.default_rng(7)
        layout = LAYOUTS[self.capabilities.pools[0].layout - 1]
        with self.session(name="check") as s:
            rows, q = random_rows(rng, 70, layout), random_q(rng, 2, 3, layout)
            indices = random_indices(rng, 2, 40, 70)
            sequence = s.create()
            for part in range(0, 70, 14):  # below the smallest limits of any test
                s.append(sequence, rows[part : part + 14])
            stream = AttendStream(s, layout)
            result = stream.attend(sequence, q, indices, want_lse=True)
            kv = s.export(sequence, dtype=pb.DTYPE_BF16, layout=layout)
            check_attend(result, *attend_reference(layout, q, kv, indices, 0.05), "working check")
            stream.close()

    def signal(self, number=signal.SIGTERM):
        self.process.send_signal(number)

    def wait_exit(self, timeout):
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            fail("dsad did not end within %.1f s; log:\n%s" % (timeout, self.text()[-3000:]))

    def stop(self, timeout=5.0 * SLOW):
        """SIGTERM, exit code 0 in time, clean log, sockets gone."""
        if self.control is not None:
            self.control.close()
        self.signal()
        code = self.wait_exit(timeout)
        self.check_log()
        equal(code, 0, "exit code of dsad (log: %s)" % self.text()[-2000:])
        for path in (self.path, self.path + ".fd"):
            truth(not os.path.exists(path), "%s is still there after the end" % path)

    def destroy(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.log.close()
        subprocess.run(["rm", "-rf", self.folder], check=False)


# ---- runner ----

TESTS = []


def test(**flags):
    """Marks a test. It gets (server, rng); tests with the same flags share a server. own=True: it gets (env, rng)
    and starts what it needs itself. settle=False: the checks afterwards are the test's own."""
    own, settle = flags.pop("own", False), flags.pop("settle", True)

    def mark(function):
        TESTS.append((function, own, settle, flags))
        return function

    return mark


class Env:
    def __init__(self, dsad, seed):
        self.dsad, self.seed, self.servers = dsad, seed, []
        self.shared, self.shared_flags = None, None

    def start(self, **options):
        return Server(self, **options).wait_ready()

    def share(self, flags):
        if self.shared is not None and (self.shared_flags != flags or self.shared.process.poll() is not None):
            self.retire()
        if self.shared is None:
            self.shared, self.shared_flags = self.start(**flags), flags
        return self.shared

    def retire(self):
        server, self.shared = self.shared, None
        if server is not None:
            server.stop()
            self.forget(server)

    def forget(self, server):
        server.destroy()
        self.servers.remove(server)

    def sweep(self):
        """Ends what a test left, apart from the shared server."""
        for server in list(self.servers):
            if server is not self.shared:
                self.forget(server)


def _run(env, function, own, settle, flags):
    rng = np.random.default_rng(env.seed ^ zlib.crc32(function.__name__.encode()))
    if own:
        env.retire()
        function(env, rng)
        for server in list(env.servers):
            server.check_log()
        return
    server = env.share(flags)
    function(server, rng)
    if settle:
        server.expect_empty()
        server.expect_working()
        server.expect_empty()
    server.check_log()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dsad", default=os.environ.get("DSAD"))
    parser.add_argument("--seed", type=int, default=int(os.environ.get("DSA_TEST_SEED", "20260101")))
    parser.add_argument("-k", default="", help="run only tests whose name contains this")
    parser.add_argument("-v", action="store_true")
    options = parser.parse_args()
    if not options.dsad:
        parser.error("give --dsad or DSAD")
    n_passed = n_failed = n_skipped = 0
    env = Env(options.dsad, options.seed)
    print("seed %d, sanitized %d" % (options.seed, SANITIZED))
    for item in TESTS + [None]:
        name = item[0].__name__ if item else "last server stops"
        if item and options.k not in name:
            continue
        begin = time.monotonic()
        try:
            if item:
                _run(env, *item)
            else:
                env.retire()
            n_passed += 1
            if options.v:
                print("ok   %s %.2f s" % (name, time.monotonic() - begin))
        except Skip as reason:
            n_skipped += 1
            print("SKIP %s: %s" % (name, reason))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            n_failed += 1
            print("FAIL %s (seed %d): %s" % (name, options.seed, error))
            frames = traceback.extract_tb(error.__traceback__)
            print(
                "".join(
                    "    %s:%d %s\n" % (os.path.basename(f.filename), f.lineno, f.line) for f in frames[-5:]
                ),
                end="",
            )
            for server in list(env.servers):
                code = server.process.poll()
                tail = server.text()[-600 if code in (None, 0) else -6000 :]
                print("    dsad[%s]: %s" % (code, tail.replace("\n", "\n    ")))
            for server in list(env.servers):  # the next test gets a fresh one
                env.forget(server)
            env.shared = None
        env.sweep()
        sys.stdout.flush()
    print("%d passed, %d failed, %d skipped" % (n_passed, n_failed, n_skipped))
    sys.stdout.flush()
    os._exit(1 if n_failed else 0)  # not sys.exit: gRPC's destructors can hang with cancelled streams
