"""http2.py - HTTP/2 by hand, for peers that no library would be: frames, one request, and what comes back."""

import socket
import struct
import time

from dsatest import SLOW, truth


def frame(kind, flags, stream, payload):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def header_block(path):
    headers = b""
    for name, value in (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "localhost"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ):
        headers += b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    return headers


def call(path, data):
    """A connection's first bytes: preface, SETTINGS, one request's HEADERS and DATA."""
    return (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + frame(4, 0, 0, b"")
        + frame(1, 4, 1, header_block(path))
        + frame(0, 0, 1, data)
    )


def connect(path):
    s = socket.socket(socket.AF_INET if isinstance(path, tuple) else socket.AF_UNIX, socket.SOCK_STREAM)
    s.settimeout(10 * SLOW)
    s.connect(path)
    return s


def read_until(connection, done):
    data = b""
    try:
        while not done(data):
            part = connection.recv(65536)
            if not part:
                break
            data += part
    except (socket.timeout, ConnectionError):
        pass
    return data


class Connection:
    """One connection with many requests; counts the streams that ended, and fails when the server ends the connection."""

    def __init__(self, path):
        self.socket = connect(path)
        self.socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b""))
        self.next_stream, self.n_ended, self.n_pings, self.data, self.goaway = 1, 0, 0, b"", None

    def request(self, path, message):
        data = b"\0" + struct.pack(">I", len(message)) + message
        stream, self.next_stream = self.next_stream, self.next_stream + 2
        self.socket.sendall(frame(1, 4, stream, header_block(path)) + frame(0, 1, stream, data))

    def ping(self, payload):
        self.socket.sendall(frame(6, 0, 0, payload))

    def answer(self, data):
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server has ended the connection; what it said before is still to be read

    def take(self):
        """Handles what has come; waits for something first. False: the server closed the connection."""
        try:
            part = self.socket.recv(65536)
        except ConnectionError:
            part = b""
        self.data += part
        while len(self.data) >= 9:
            size = int.from_bytes(self.data[:3], "big")
            if len(self.data) < 9 + size:
                break
            kind, flags = self.data[3], self.data[4]
            payload, self.data = self.data[9 : 9 + size], self.data[9 + size :]
            if kind == 4 and not flags & 1:
                self.answer(frame(4, 1, 0, b""))
            elif kind == 6 and flags & 1:
                self.n_pings += 1
            elif kind == 6:
                self.answer(frame(6, 1, 0, payload))
            elif kind == 7:
                self.goaway = struct.unpack(">I", payload[4:8])[0], payload[8:]
            elif kind == 3 or (kind == 1 and flags & 1):  # reset after the end, or trailers
                self.n_ended += kind == 1
        return part != b""

    def wait_for(self, n_ended, timeout):
        end = time.monotonic() + timeout
        while self.n_ended < n_ended:
            truth(time.monotonic() < end, "%d of %d calls were answered" % (self.n_ended, n_ended))
            truth(self.take() and self.goaway is None, "the server ended the connection: %r" % (self.goaway,))

    def close(self):
        self.socket.close()
