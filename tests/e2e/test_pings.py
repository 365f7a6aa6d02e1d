#!/usr/bin/python3
"""test_pings.py - clients that keep an idle connection alive by pings. A program of its own, as it mostly waits."""

from dsatest import *  # noqa: F403
import http2

INTERVAL = 5.0  # what README and the server's settings allow, with calls or without
N_PINGS = 6  # with gRPC's own setting the fourth would end the connection


@test(tcp="127.0.0.1:0")
def pings_at_the_allowed_interval_are_answered(server, rng):
    """Over TCP and over the unix socket, without any call: no GOAWAY, however long it goes on."""
    port = int(re.search(r"tcp port=(\d+)", server.text()).group(1))
    connections = {"unix": http2.Connection(server.path), "tcp": http2.Connection(("127.0.0.1", port))}
    for number in range(1, N_PINGS + 1):
        for name, connection in connections.items():
            connection.ping(struct.pack(">Q", number))
            while connection.n_pings < number:
                truth(connection.take(), "%s: the connection ended at ping %d" % (name, number))
                equal(connection.goaway, None, "%s: GOAWAY at ping %d" % (name, number))
        if number < N_PINGS:
            time.sleep(INTERVAL + 0.2)  # the time itself is what is tested
    for name, connection in connections.items():
        connection.request("/grpc.health.v1.Health/Check", b"")
        connection.wait_for(1, 20 * SLOW)
        connection.close()


@test()
def pings_without_end_are_refused(server, rng):
    """The rule is enforced: who pings all the time is told so, and only that connection ends."""
    connection = http2.Connection(server.path)
    try:
        for number in range(50):
            connection.ping(struct.pack(">Q", number))
    except (BrokenPipeError, ConnectionResetError):
        pass
    while connection.goaway is None:
        truth(connection.take() or connection.goaway is not None, "the connection ended without a word")
    equal(connection.goaway, (11, b"too_many_pings"), "GOAWAY")
    connection.close()
    server.expect_working()


if __name__ == "__main__":
    main()
