"""dsaclient.py - the client: connections, sessions, regions, Attend streams."""

from dsanum import *  # noqa: F403


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
    """One connection of its own. With credentials: TLS."""

    def __init__(self, target, credentials=None):
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.enable_retries", 0),
        ]
        self.target = target
        if credentials is None:
            self.channel = grpc.insecure_channel(target, options=options)
        else:
            self.channel = grpc.secure_channel(target, credentials, options=options)

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
