"""dsabase.py - what every end-to-end program begins with: imports, stubs generated from proto/, checks."""

import array
import fcntl
import importlib.util
import itertools
import mmap
import os
import queue
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

sys.dont_write_bytecode = True

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
SANITIZED = os.environ.get("DSA_SANITIZED", "") not in ("", "0")
SMALL = SANITIZED or os.environ.get("DSA_SMALL", "") not in ("", "0")  # a build whose full scale another one covers
SLOW = 8 if SANITIZED else 1  # what an instrumented server takes longer


def skip_program(reason):
    print("SKIP %s: %s" % (os.path.basename(sys.argv[0]), reason))
    print("0 passed, 0 failed, 1 skipped")
    sys.stdout.flush()
    os._exit(0)


# gRPC's fork handlers wait until its threads are idle, and a thread that waits for a peer never is: a start would hang.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

try:
    import grpc
    import numpy as np
    import google.protobuf.message  # noqa: F401
except ImportError as missing:
    skip_program("needs python3-grpcio, python3-protobuf and python3-numpy (%s)" % missing)


def with_files(n, command):
    """The command with a limit on open files, set without code of ours between fork and exec."""
    return ["prlimit", "--nofile=%d:%d" % (n, n), *command]


def full(n, small):
    """A count at the scale of the case in one build, a stated smaller one in the others. Says which."""
    chosen = small if SMALL else n
    print("     scale %d of %d" % (chosen, n))
    return chosen


FOLDERS = []  # temporary ones that the runner removes after the test


def scaled(n, least=1):
    """A loop count, smaller when the server is instrumented or another build does the whole."""
    return max(least, n // (10 if SMALL else 1))


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
