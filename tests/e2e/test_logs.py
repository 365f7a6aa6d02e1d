#!/usr/bin/python3
"""test_logs.py - log lines: whose request they are about, slow requests, and that no client can write one."""

import json

from busy import *  # noqa: F403

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = "00-%s-%s-01" % (TRACE, SPAN)
OTHER = "00-%s-%s-00" % ("1" * 32, SPAN)
MALFORMED = ("", "00-" + TRACE, PARENT.upper(), "ff" + PARENT[2:], PARENT + "-x", PARENT.replace(TRACE, "0" * 32),
             PARENT.replace(SPAN, "0" * 16), 'level="error"', "x" * 5000)


def echoed(call):
    """traceparent in a call's initial metadata; None: there is none."""
    values = [value for key, value in call.initial_metadata() or () if key == "traceparent"]
    truth(len(values) <= 1, "traceparent comes %d times" % len(values))
    return values[0] if values else None


def unary(server, name, request, parent=None):
    """The call, ended, whatever its status."""
    method = server.control.channel.unary_unary(
        "/%s/%s" % (SERVICE, name), request_serializer=serialize, response_deserializer=METHODS[name][1].FromString
    )
    metadata = [] if parent is None else [("traceparent", parent)]
    call = method.future(request, metadata=metadata, timeout=20 * SLOW)
    call.code()
    return call


def json_lines(server):
    """Every line of the log, parsed by a reader that takes no key twice."""

    def no_twins(pairs):
        keys = [key for key, _ in pairs]
        truth(len(set(keys)) == len(keys), "a key twice: %r" % (keys,))
        return dict(pairs)

    lines = []
    for line in server.text().splitlines():
        try:
            lines.append(json.loads(line, object_pairs_hook=no_twins))
        except ValueError as error:
            fail("no JSON (%s): %r" % (error, line))
    return lines


def find(server, **fields):
    return [line for line in json_lines(server) if all(line.get(k) == v for k, v in fields.items())]


def one_line(server, **fields):
    return wait_until(lambda: find(server, **fields), 20 * SLOW, "a line with %r" % fields)[-1]


@test(own=True)
def a_calls_traceparent_comes_back_and_is_logged(env, rng):
    server = env.start(log_level="debug", log_format="json")
    equal(echoed(unary(server, "GetCapabilities", pb.GetCapabilitiesRequest(), PARENT)), PARENT, "echo")
    equal(echoed(unary(server, "GetCapabilities", pb.GetCapabilitiesRequest())), None, "echo of nothing")
    for text in MALFORMED:
        call = unary(server, "GetCapabilities", pb.GetCapabilitiesRequest(), text)
        equal((call.code(), echoed(call)), (grpc.StatusCode.OK, None), "code and echo of %r" % text[:80])
    refused = unary(server, "CreateSequence", pb.CreateSequenceRequest(session=b"x"), PARENT)
    truth(refused.code() != grpc.StatusCode.OK, "refused")
    equal(echoed(refused), PARENT, "echo of a refused call")
    line = one_line(server, msg="request refused", trace_id=TRACE)
    equal(line["method"], "/%s/CreateSequence" % SERVICE, "method")
    truth(line["call_id"] > 0, "call_id")
    unary(server, "CreateSequence", pb.CreateSequenceRequest(session=b"x"))
    second = one_line(server, msg="request refused", call_id=line["call_id"] + 1)
    truth("trace_id" not in second, "a trace id from nowhere: %r" % second)


@test(own=True)
def a_requests_traceparent_comes_back_and_is_logged(env, rng):
    server = env.start(log_level="debug", log_format="json")
    session = server.session()
    sequence = session.create()
    session.append(sequence, random_rows(rng, 4))
    method = session.client.channel.stream_stream(
        "/%s/Attend" % SERVICE, request_serializer=serialize, response_deserializer=pb.AttendReply.FromString
    )
    rows = inline(random_rows(rng, 1))

    def append(request_id, parent, sequence=sequence):
        op = pb.AppendOp(sequence_id=sequence, rows=rows)
        return pb.AttendRequest(session=session.token, request_id=request_id, append=op, traceparent=parent)

    attend = attend_op(sequence, random_q(rng, 40, 8), np.zeros((40, 4), np.int32))
    asked = [
        append(1, OTHER),
        append(2, ""),
        append(3, "00-nonsense"),
        append(4, OTHER, sequence=999),  # refused by the worker
        append(5, "", sequence=999),
        pb.AttendRequest(request_id=6, attend=attend, traceparent=OTHER),  # several pieces
        pb.AttendRequest(request_id=7, attend=attend_op([], random_q(rng, 0, 8), np.zeros((0, 4), np.int32)), traceparent=OTHER),
        pb.AttendRequest(request_id=8, traceparent=OTHER),  # refused at the door
    ]
    call = method(iter(asked), metadata=[("traceparent", PARENT)])
    replies = {}
    for reply in call:
        replies.setdefault(reply.request_id, []).append(reply)
    equal(echoed(call), PARENT, "echo of the call")
    expected = {1: OTHER, 2: "", 3: "", 4: OTHER, 5: "", 6: OTHER, 7: OTHER, 8: OTHER}
    equal({i: r[-1].traceparent for i, r in replies.items()}, expected, "echoes of requests")
    truth(len(replies[6]) > 1 and all(r.traceparent == "" for r in replies[6][:-1]), "only the last piece has it")
    for request_id, trace in ((4, "1" * 32), (5, TRACE), (8, "1" * 32)):
        line = one_line(server, msg="attend refused", request_id=request_id)
        equal(line["trace_id"], trace, "trace id of request %d" % request_id)
    session.close()


@test(own=True)
def slow_requests_leave_a_line(env, rng):
    server = env.start(hooked={"delay_ns": 30000000}, log_format="json", slow_request="20ms")
    session = server.session()
    sequence = session.create()
    session.append(sequence, random_rows(rng, 4))
    stream = session.client.bidi("Attend")
    op = attend_op(sequence, random_q(rng, 20, 8), np.zeros((20, 4), np.int32))
    stream.send(pb.AttendRequest(session=session.token, request_id=2**64 - 1, attend=op, traceparent=PARENT))
    while not stream.recv().last:
        pass
    line = one_line(server, msg="slow request", trace_id=TRACE)
    equal((line["method"], line["rows"], line["sequences"]), ("/%s/Attend" % SERVICE, 20, 1), "what was slow")
    equal((line["level"], line["code"], "reason" in line), ("warn", "OK", False), "level, code, reason")
    equal(line["request_id"], str(2**64 - 1), "request_id, which a number of JSON cannot hold")
    truth(line["session"] > 0 and line["call_id"] > 0 and line["launches"] >= 1, "numbers of %r" % line)
    truth(line["device_us"] >= 30000 and line["total_us"] >= line["device_us"], "times of %r" % line)
    truth(line["total_us"] >= line["queue_us"] + line["device_us"], "stages of %r" % line)
    stream.send(pb.AttendRequest(request_id=7, attend=op, deadline_us=1))
    stream.recv()
    server.hooks.delay_ns = 0
    n = len(find(server, msg="slow request"))
    stream.send(pb.AttendRequest(request_id=8, append=pb.AppendOp(sequence_id=sequence, rows=inline(random_rows(rng, 1)))))
    stream.recv()
    equal(len(find(server, msg="slow request", request_id=8)), 0, "lines of a fast request")
    truth(n >= 1, "slow lines are there")
    stream.half_close()
    session.close()


@test(own=True)
def slow_calls_leave_a_line(env, rng):
    """A unary call behind a long launch; the streams that are open as long as clients like are none."""
    server = env.start(hooked=True, log_format="json", slow_request="50ms", inline_flops=0)
    session = server.session()
    sequence = session.create()
    session.append(sequence, random_rows(rng, 4))
    server.hooks.gate = 1
    running = session.attend(sequence, random_q(rng, 1, 8), np.zeros((1, 4), np.int32), wait=False)
    wait_until(lambda: server.hooks.n_entered > server.hooks.n_left, 20 * SLOW, "the launch is held")
    method = session.client.channel.unary_unary(
        "/%s/GetSequence" % SERVICE, request_serializer=serialize, response_deserializer=pb.Sequence.FromString
    )
    begin = time.monotonic()
    waiting = method.future(
        pb.GetSequenceRequest(session=session.token, sequence_id=sequence), metadata=[("traceparent", PARENT)]
    )
    session.stream.wait_until_read()
    wait_until(lambda: time.monotonic() > begin + 0.2, 20, "the call has waited for its 50 ms")
    wait_until(lambda: server.control.call("GetCapabilities") is not None, 20 * SLOW, "the service thread answers")
    server.hooks.gate = 0
    waiting.result()
    session.stream.wait(running)
    session.close()
    line = one_line(server, msg="slow request", method="/%s/GetSequence" % SERVICE)
    equal((line["trace_id"], line["code"], line["sequences"]), (TRACE, "OK", 1), "whose, how it ended")
    truth(line["total_us"] >= 50000 and line["queue_us"] <= line["total_us"], "times of %r" % line)
    methods = {l["method"] for l in find(server, msg="slow request")}
    truth("/%s/OpenSession" % SERVICE not in methods, "streams are not timed: %r" % methods)


@test(own=True)
def slow_log_off(env, rng):
    server = env.start(hooked={"delay_ns": 3000000}, slow_request="0us")
    server.expect_working()
    server.hooks.delay_ns = 0
    server.stop()
    truth("slow request" not in server.text(), "slow-request 0us logs nothing")


HOSTILE = (
    'a" level="error',
    "a\nlevel=error msg=forged",
    '\\","level":"error","x":"',
    "\x1b[31mred\x07",
    "\u202edrow",
    "gr\u00fc\u00df \U0001f600",
    "\x7f\x01\x00"[:2],
    "a=b session=1",
    "%s%n%d",
    "'; DROP TABLE sessions",
)


@test(own=True)
def json_lines_parse_whatever_clients_call_themselves(env, rng):
    """Under load, several clients at a time, at the level that says most."""
    server = env.start(log_level="trace", log_format="json", max_sessions=200)
    failures = []

    def work(seed):
        mine = np.random.default_rng(seed)
        try:
            for i in range(scaled(40, 10)):
                name = HOSTILE[int(mine.integers(len(HOSTILE)))]
                session = server.session(name=name)
                with session:
                    sequence = session.create()
                    session.append(sequence, random_rows(mine, 2))
                    session.attend(sequence, random_q(mine, 3, 8), np.zeros((3, 4), np.int32))
                    region = session.region(4096)
                    truth(region.unregister() is not None, "unregistered")
                    try:
                        session.attend(sequence, random_q(mine, 1, 8), np.zeros((1, 4), np.int32), phase=name)
                    except Refused:
                        pass
                session.client.close()
        except BaseException as error:  # noqa: B902
            failures.append(error)

    workers = [threading.Thread(target=work, args=(int(rng.integers(1 << 30)),)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    truth(not failures, "a client failed: %r" % failures[:1])
    server.stop()
    lines = json_lines(server)
    levels = {line["level"] for line in lines}
    truth(levels <= {"info", "warn", "debug", "trace"}, "levels %r" % levels)
    for line in lines:
        truth(set(line) >= {"ts", "level", "msg"}, "keys of %r" % line)
        truth(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", line["ts"]), "ts of %r" % line)
        truth(line["msg"] != "forged", "a forged line: %r" % line)
    truth(any(line["msg"] == "session opened" for line in lines), "sessions are logged")
    refusals = [line for line in lines if line["msg"] == "attend refused" and line["field"] == "attend.phase"]
    truth(len(refusals) > 20, "%d refusals" % len(refusals))


if __name__ == "__main__":
    main()
