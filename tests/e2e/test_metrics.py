#!/usr/bin/python3
"""test_metrics.py - probes and metrics over HTTP, and grpc.health.v1: what they say, when, and how long they take."""

import http.client
import threading

from busy import *  # noqa: F403

STARTUP, READY, LIVE = "/startupz", "/readyz", "/livez"


def http_port(server):
    in_log(server, "http port=")
    return int(re.search(r"http port=(\d+)", server.text()).group(1))


class Http:
    """Requests over one connection, which is made again where the server has closed it."""

    def __init__(self, port):
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30 * SLOW)

    def get(self, path, method="GET", headers=None):
        for is_last in (False, True):
            try:
                self.connection.request(method, path, headers=headers or {})
                reply = self.connection.getresponse()
                return reply.status, reply.read().decode(), reply
            except (http.client.HTTPException, ConnectionError):
                self.connection.close()
                if is_last:
                    raise

    def probes(self):
        return tuple(self.get(path)[0] for path in (STARTUP, READY, LIVE))

    def metrics(self):
        return parse(self.get("/metrics")[1])


SAMPLE = re.compile(r"^([a-z_:]+)(?:\{(.*)\})? (\S+)$")


def parse(text):
    """{name: {labels: value}}, labels as a frozenset of pairs. A line that is no sample fails."""
    found = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        match = SAMPLE.match(line)
        truth(match, "not a sample: %r" % line)
        labels = frozenset(re.findall(r'([a-z_]+)="([^"]*)"', match[2] or ""))
        series = found.setdefault(match[1], {})
        truth(labels not in series, "twice: %s" % line)
        series[labels] = float(match[3])
    return found


def value(metrics, name, **labels):
    return metrics[name].get(frozenset(labels.items()), 0.0)


def expect_soon(page, what, wanted, read):
    wait_until(lambda: read(page.metrics()) == wanted, 20 * SLOW, "%s is %r" % (what, wanted))


HTTP = {"http": "127.0.0.1:0"}
STUCK = "the worker does not move"


# ---- metrics ----


def documented():
    """{name: set of labels} of server/METRICS.md."""
    rows = {}
    with open(os.path.join(ROOT, "server", "METRICS.md")) as f:
        for line in f:
            match = re.match(r"\| `([a-z_]+)(?:\{([^}]*)\})?` \| (counter|gauge|histogram)( T)? \| .+ \| .+ \|$", line)
            if match:
                rows[match[1]] = ({x.strip() for x in match[2].split(",")} if match[2] else set(), match[3])
    return rows


NOT_ALWAYS = {"dsad_tls_certificate_expiry_timestamp_seconds", "dsad_tls_reload_failures_total", "dsad_device_errors_total"}


@test(**HTTP)
def every_metric_is_documented(server, rng):
    text = Http(http_port(server)).get("/metrics")[1]
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    helps = dict(re.findall(r"^# HELP (\S+) (.+)$", text, re.M))
    rows = documented()
    equal(set(types), set(helps), "help for each type")
    equal(set(types) - set(rows), set(), "metrics that METRICS.md does not have")
    equal(set(rows) - set(types) - NOT_ALWAYS, set(), "metrics that only METRICS.md has")
    for name, series in parse(text).items():
        base = name if name in types else re.sub(r"_(bucket|sum|count)$", "", name)
        equal(types[base], rows[base][1], "type of %s" % base)
        for labels in series:
            equal({k for k, _ in labels} - {"le"}, rows[base][0], "labels of %s" % name)


@test(**HTTP)
def histograms_add_up(server, rng):
    with server.session() as s:
        sequence = s.create()
        s.append(sequence, random_rows(rng, 100))
        for _ in range(10):
            s.attend(sequence, random_q(rng, 3, 8), random_indices(rng, 3, 64, 100, 0))
    metrics = Http(http_port(server)).metrics()
    n = 0
    for name, series in metrics.items():
        if not name.endswith("_bucket"):
            continue
        base, by_labels = name[:-7], {}
        for labels, count in series.items():
            le = dict(labels)["le"]
            by_labels.setdefault(labels - {("le", le)}, []).append((float(le), count))
        for labels, buckets in by_labels.items():
            buckets.sort()
            counts = [count for _, count in buckets]
            equal(counts, sorted(counts), "%s %r rises" % (name, labels))
            equal(buckets[-1][0], float("inf"), "last bucket of %s" % name)
            equal(counts[-1], metrics[base + "_count"][labels], "count of %s %r" % (base, labels))
            n += counts[-1]
    truth(n > 30, "only %d observations" % n)
    total = sum(metrics["dsad_device_memory_bytes"].values())
    equal(total, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "memory of the device, used and free")
    n_launches = value(metrics, "dsad_batch_rows_count")
    for stage in ("launch", "device"):
        equal(value(metrics, "dsad_stage_seconds_count", stage=stage), n_launches, "launches timed, stage %s" % stage)
    truth(value(metrics, "dsad_stage_seconds_sum", stage="device") > 0, "time on the device")
    truth(value(metrics, "dsad_stage_seconds_count", stage="queue") >= n_launches, "requests that waited")
    n_rows = value(metrics, "dsad_batch_rows_sum")
    truth(n_rows >= 30, "only %d rows" % n_rows)
    expect_soon(Http(http_port(server)), "rows answered", n_rows, lambda m: value(m, "dsad_rows_total"))


@test(settle=False, **HTTP)
def counts_what_is_done(server, rng):
    page = Http(http_port(server))
    before = page.metrics()

    def rise(name, **labels):
        return value(page.metrics(), name, **labels) - value(before, name, **labels)

    with server.session(name="counted") as s:
        sequences = [s.create() for _ in range(3)]
        s.append(sequences[0], random_rows(rng, 130))
        s.attend(sequences[0], random_q(rng, 5, 8), random_indices(rng, 5, 32, 130, 0))
        bad = np.full((2, 7), 1000, np.int32)  # past the end: skipped, and counted
        s.attend(sequences[0], random_q(rng, 2, 8), bad)
        expect_refusal(lambda: s.attend(sequences[0] + 99, random_q(rng, 1, 8), bad[:1]), "NOT_FOUND")
        expect_refusal(lambda: s.append(sequences[0] + 99, random_rows(rng, 1)), "NOT_FOUND")
        region = s.region(1 << 20)
        expect_soon(
            page,
            "sequences created",
            3,
            lambda m: value(m, "dsad_requests_total", method="CreateSequence", code="OK")
            - value(before, "dsad_requests_total", method="CreateSequence", code="OK"),
        )
        equal(rise("dsad_requests_total", method="Attend", code="OK"), 2, "attends")
        equal(rise("dsad_requests_total", method="Attend", code="NOT_FOUND"), 1, "attends refused")
        wait_until(
            lambda: rise("dsad_requests_total", method="Append", code="NOT_FOUND") == 1, 20 * SLOW, "append refused"
        )
        equal(rise("dsad_refused_total", reason="NOT_FOUND"), 2, "refusals")
        equal(rise("dsad_pool_pages", state="owned"), 3, "pages for 130 tokens")
        equal(rise("dsad_sequences"), 3, "sequences")
        expect_soon(page, "rows", 7, lambda m: value(m, "dsad_rows_total") - value(before, "dsad_rows_total"))
        expect_soon(
            page,
            "invalid indices",
            14,
            lambda m: value(m, "dsad_invalid_indices_total") - value(before, "dsad_invalid_indices_total"),
        )
        live = {"kind": "memfd", "transport": "fd_socket", "state": "live"}
        expect_soon(page, "regions", 1, lambda m: value(m, "dsad_regions", **live))
        expect_soon(page, "bytes of regions", 1 << 20, lambda m: value(m, "dsad_region_bytes"))
        expect_soon(page, "sessions", 1, lambda m: value(m, "dsad_sessions"))
        region.unregister()
    expect_soon(page, "sessions", 0, lambda m: value(m, "dsad_sessions"))
    wait_until(lambda: value(page.metrics(), "dsad_pool_pages", state="owned") == 0, 20 * SLOW, "pages are back")
    equal(value(page.metrics(), "dsad_pool_pages", state="free"), 256, "free pages")


@test(settle=False, **HTTP)
def series_do_not_depend_on_clients(server, rng):
    """100,000 distinct ids, names and methods that do not exist: as many series as before."""
    page = Http(http_port(server))
    n = full(100000, 5000)
    with server.session() as s:
        s.append(s.create(), random_rows(rng, 2))
        expect_refusal(lambda: s.append(999999, random_rows(rng, 1)), "NOT_FOUND")
        channel = s.client.channel

        def unknown(i):
            return channel.unary_unary("/x%d.Y%d/Z%d" % (i, i, i)).future(b"", timeout=120 * SLOW)

        expect_error_code(unknown(0), grpc.StatusCode.UNIMPLEMENTED)
        for labels in ({"method": "other", "code": "UNIMPLEMENTED"}, {"method": "Append", "code": "NOT_FOUND"}):
            wait_until(lambda: value(page.metrics(), "dsad_requests_total", **labels) > 0, 20 * SLOW, "it is counted")
        series_before = count_series(page)
        for begin in range(0, n // 2, 100):
            for call in [unknown(begin + i) for i in range(100)]:
                expect_error_code(call, grpc.StatusCode.UNIMPLEMENTED)
        look = channel.unary_unary("/%s/GetSequence" % SERVICE, serialize)
        for begin in range(0, n // 2, 100):
            calls = [
                look.future(pb.GetSequenceRequest(session=s.token, sequence_id=10**6 + begin + i), timeout=120 * SLOW)
                for i in range(100)
            ]
            for call in calls:
                expect_error_code(call, grpc.StatusCode.NOT_FOUND)
    for i in range(full(200, 50)):
        client = server.client()
        with Session(client, name="peer-%d-\"\n\\" % i):
            pass
        client.close()
    expect_soon(
        page,
        "unknown methods",
        n // 2 + 1,
        lambda m: value(m, "dsad_requests_total", method="other", code="UNIMPLEMENTED"),
    )
    after = count_series(page)
    truth(after - series_before <= 1, "%d series, then %d" % (series_before, after))  # NOT_FOUND of one method
    for i in range(100):
        page.get("/" + "x" * (i * 17) + "?%d" % i, headers={"X-%d" % i: "y"})
    equal(count_series(page), after, "series after strange requests")


def expect_error_code(call, code):
    try:
        call.result()
        fail("was answered")
    except grpc.RpcError as error:
        equal(error.code(), code, "code")


def count_series(page):
    return sum(len(series) for series in page.metrics().values())


# ---- probes ----


@test(own=True)
def startup_is_seen_from_outside(env, rng):
    """While the device is opened, the process lives and has not started."""
    server = Server(env, hooked={"open_gate": 1}, **{"http": "127.0.0.1:%d" % free_port()})
    port = int(re.search(r"127\.0\.0\.1:(\d+)", " ".join(server.process.args)).group(1))
    wait_until(lambda: server.hooks.n_opening > 0, 20 * SLOW, "the device is being opened")
    page = Http(port)
    equal(page.probes(), (503, 503, 200), "while it starts")
    equal(page.get(STARTUP)[1], "starting\n", "why")
    truth("dsad_ready" in page.metrics(), "metrics while it starts")
    server.hooks.open_gate = 0
    server.wait_ready()
    wait_until(lambda: page.probes() == (200, 200, 200), 20 * SLOW, "all probes are well")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def check_health(client, service):
    method = client.channel.unary_unary(
        "/grpc.health.v1.Health/Check", serialize, health_pb.HealthCheckResponse.FromString
    )
    return method(health_pb.HealthCheckRequest(service=service), timeout=30 * SLOW).status


def watch(client, service):
    method = client.channel.unary_stream(
        "/grpc.health.v1.Health/Watch", serialize, health_pb.HealthCheckResponse.FromString
    )
    return method(health_pb.HealthCheckRequest(service=service), timeout=60 * SLOW)  # so that what never comes fails


UP, DOWN = health_pb.HealthCheckResponse.SERVING, health_pb.HealthCheckResponse.NOT_SERVING


@test(own=True)
def stuck_worker_is_not_ready_and_recovers(env, rng):
    server = env.start(hooked=True, **{"watchdog": "300ms", "inline-flops": 0, **HTTP})
    server.expect_error(STUCK)
    page = Http(http_port(server))
    watched, lived = watch(server.control, "ready"), watch(server.control, "live")
    equal((next(watched).status, next(lived).status), (UP, UP), "before")
    s = server.session()
    sequence = s.create()
    s.append(sequence, random_rows(rng, 10))
    server.hooks.gate = 1
    request = s.attend(sequence, random_q(rng, 1, 8), random_indices(rng, 1, 8, 10, 0), wait=False)
    equal(next(watched).status, DOWN, "the watchdog turns readiness off")
    equal(page.probes(), (200, 503, 200), "while it is stuck")
    equal(page.get(READY)[1], "worker stuck\n", "why")
    equal(value(page.metrics(), "dsad_worker_stuck"), 1, "dsad_worker_stuck")
    for service, status in (("", DOWN), (SERVICE, DOWN), ("ready", DOWN), ("live", UP), ("startup", UP)):
        equal(check_health(server.control, service), status, "Check(%r)" % service)
    server.hooks.gate = 0
    s.stream.wait(request)
    equal(next(watched).status, UP, "it moves again")
    equal(page.probes(), (200, 200, 200), "afterwards")
    lived.cancel()
    watched.cancel()


@test(own=True)
def lost_device_turns_live_off(env, rng):
    server = env.start(hooked=True, **HTTP)
    server.expect_error("device lost")
    page = Http(http_port(server))
    s = server.session()
    sequence = s.create()
    s.append(sequence, random_rows(rng, 10))
    watched = watch(server.control, "live")
    equal(next(watched).status, UP, "before")
    server.hooks.launch_fail = DSK_E_DEVICE
    expect_refusal(
        lambda: s.attend(sequence, random_q(rng, 1, 8), random_indices(rng, 1, 8, 10, 0)),
        "DEVICE_LOST",
        code=grpc.StatusCode.UNAVAILABLE,
    )
    equal(next(watched).status, DOWN, "live")
    equal(page.probes(), (200, 503, 503), "after the loss")
    equal(page.get(LIVE)[1], "device lost\n", "why")
    metrics = page.metrics()
    equal((value(metrics, "dsad_live"), value(metrics, "dsad_ready")), (0, 0), "gauges")
    equal(sum(metrics["dsad_device_errors_total"].values()), 1, "device errors")
    watched.cancel()


def kernel_status(name):
    with open(os.path.join(ROOT, "kernels", "dsk.h")) as f:
        return int(re.search(r"X\(%s, (-?\d+)," % name, f.read()).group(1))


DSK_E_DEVICE = kernel_status("DSK_E_DEVICE")


@test(own=True)
def draining_is_not_ready_but_live(env, rng):
    """Also: a Drain and the SIGTERM after it are one wish; what was accepted is done. A second signal ends the grace."""
    server = env.start(hooked=True, **{"inline-flops": 0, "drain-grace": "600s", **HTTP})
    page = Http(http_port(server))
    s = server.session()
    sequence = s.create()
    s.append(sequence, random_rows(rng, 10))
    before = server.hooks.n_entered
    server.hooks.gate = 1
    request = s.attend(sequence, random_q(rng, 1, 8), random_indices(rng, 1, 8, 10, 0), wait=False)
    wait_until(lambda: server.hooks.n_entered > before, 20 * SLOW, "the launch waits")
    server.control.call("Drain", grace_us=600 * 10**6)
    wait_until(lambda: page.probes() == (200, 503, 200), 20 * SLOW, "draining is not ready, and live")
    equal(page.get(READY)[1], "draining\n", "why")
    equal(value(page.metrics(), "dsad_draining"), 1, "dsad_draining")
    server.signal()
    in_log(server, "draining already")
    expect_refusal(s.create, "DRAINING", code=grpc.StatusCode.UNAVAILABLE)
    equal(page.probes(), (200, 503, 200), "the signal after a Drain does not cut it short")
    server.hooks.gate = 0
    s.stream.wait(request)
    s.abandon()
    equal(server.wait_exit(10 * SLOW), 0, "exit code")


@test(own=True)
def second_signal_after_drain_ends_the_grace(env, rng):
    server = env.start(**{"drain-grace": "600s"})
    blocker = Blocker(server, rng, 20.0 if not SANITIZED else 60.0)
    blocker.start_and_see()
    server.control.call("Drain", grace_us=600 * 10**6)
    in_log(server, "draining")
    server.signal()
    in_log(server, "draining already")
    truth(server.process.poll() is None, "it waits for its work")
    server.signal()
    equal(server.wait_exit(8 * SLOW), 0, "exit code")


@test(own=True)
def probes_do_not_wait_for_work(env, rng):
    """The worker stands still, its queue is full, streams wait: probes and metrics answer all the same."""
    server = env.start(
        hooked=True, **{"inline-flops": 0, "max-queue": 32, "health": "127.0.0.1:0", "watchdog": "0us", **HTTP}
    )
    page = Http(http_port(server))
    s = server.session()
    sequence = s.create()
    s.append(sequence, random_rows(rng, 10))
    server.hooks.gate = 1
    q, indices = random_q(rng, 1, 8), random_indices(rng, 1, 8, 10, 0)
    requests = [s.attend(sequence, q, indices, wait=False) for _ in range(40)]
    wait_until(
        lambda: value(page.metrics(), "dsad_refused_total", reason="QUEUE_FULL") > 0, 20 * SLOW, "the queue is full"
    )
    client = Client("127.0.0.1:%d" % port_of(server, "health"))
    took = []
    for i in range(scaled(2000)):
        begin = time.monotonic()
        if i % 4 == 3:
            equal(check_health(client, "ready"), UP, "health")
        else:
            equal(page.get((READY, LIVE, STARTUP)[i % 4])[0], 200, "probe")
        took.append(time.monotonic() - begin)
    took.sort()
    p999 = took[int(len(took) * 0.999) - 1]
    print("     probes: median %.2f ms, p99.9 %.2f ms" % (took[len(took) // 2] * 1e3, p999 * 1e3))
    truth(p999 < 5.0 * SLOW, "p99.9 is %.3f s" % p999)  # far above the aim, for machines that stop for a while
    truth(value(page.metrics(), "dsad_queue_requests") >= 32, "the queue is seen")
    server.hooks.gate = 0
    for request in requests:
        try:
            s.stream.wait(request)
        except Refused:
            pass
    client.close()


def port_of(server, name):
    in_log(server, name + " port=")
    return int(re.search(name + r" port=(\d+)", server.text()).group(1))


@test(health="127.0.0.1:0", **HTTP)
def health_port_answers_health_alone(server, rng):
    client = Client("127.0.0.1:%d" % port_of(server, "health"))
    for service in ("", SERVICE, "startup", "ready", "live"):
        equal(check_health(client, service), UP, "Check(%r)" % service)
    try:
        check_health(client, "nothing")
        fail("a service that is not there")
    except grpc.RpcError as error:
        equal(error.code(), grpc.StatusCode.NOT_FOUND, "unknown service")
    page = Http(http_port(server))
    before = value(page.metrics(), "dsad_refused_total", reason="ACCESS_DENIED")
    for method in ("GetCapabilities", "GetStats", "Drain"):
        expect_refusal_of_call(client, method)
    equal(value(page.metrics(), "dsad_refused_total", reason="ACCESS_DENIED") - before, 3, "refusals at the door")
    client.close()


def expect_refusal_of_call(client, method):
    call = client.channel.unary_unary("/%s/%s" % (SERVICE, method))
    try:
        call(b"", timeout=30 * SLOW)
        fail("%s was answered on the health port" % method)
    except grpc.RpcError as error:
        equal(error.code(), grpc.StatusCode.PERMISSION_DENIED, method)
        truth("grpc.health.v1 alone" in error.details(), error.details())


@test(settle=False, **HTTP)
def connect_check_close_leaves_nothing(server, rng):
    port = http_port(server)
    Http(port).get(LIVE)
    before = server.n_fds()
    for _ in range(full(10000, 500)):
        page = Http(port)
        equal(page.get(LIVE)[0], 200, "probe")
        page.connection.close()
    wait_until(lambda: server.n_fds() <= before, 20 * SLOW, "descriptors are back")


# ---- HTTP ----


@test(**HTTP)
def odd_requests_are_answered(server, rng):
    page = Http(http_port(server))
    for path, method, code in (
        ("/", "GET", 404),
        ("/metrics/", "GET", 404),
        ("/readyz/../metrics", "GET", 404),
        ("/metrics", "POST", 405),
        ("/metrics", "DELETE", 405),
        ("/metrics?x=1", "GET", 200),
        ("/metrics", "HEAD", 200),
        ("/livez", "HEAD", 200),
    ):
        equal(page.get(path, method)[0], code, "%s %s" % (method, path))
    status, text, reply = page.get("/metrics")
    equal(reply.getheader("Content-Type"), "text/plain; version=0.0.4; charset=utf-8", "content type")
    equal(page.get("/metrics", "POST")[2].getheader("Allow"), "GET, HEAD", "allowed methods")


@test(**HTTP)
def hostile_peers_do_not_stop_probes(server, rng):
    port = http_port(server)
    held = []
    for i in range(40):  # as many as a probe may find before it: open, silent, or half a request
        s = socket.create_connection(("127.0.0.1", port), timeout=30 * SLOW)
        s.sendall((b"", b"GET /metr", b"GET /livez HTTP/1.1\r\nX: ")[i % 3])
        held.append(s)
    for garbage in (b"\x00" * 100, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET " + b"x" * 100000 + b" HTTP/1.1\r\n\r\n"):
        s = socket.create_connection(("127.0.0.1", port), timeout=30 * SLOW)
        try:
            s.sendall(garbage)
        except OSError:
            pass
        held.append(s)
    equal(Http(port).probes(), (200, 200, 200), "probes beside them")
    for s in held:
        s.close()


@test(own=True)
def bad_addresses_are_refused_by_name(env, rng):
    for flag in ("http", "health"):
        for bad in ("nowhere", "127.0.0.1:", ":80", "127.0.0.1:99999999", "256.0.0.1:80"):
            server = Server(env, **{flag: bad})
            code = server.wait_exit(20 * SLOW)
            equal(code, 2, "exit code for --%s %s: %s" % (flag, bad, server.text()))
            truth("%s=%s" % (flag, bad) in server.text(), server.text())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for flag in ("http", "health"):
            server = Server(env, **{flag: "127.0.0.1:%d" % taken.getsockname()[1]})
            equal(server.wait_exit(20 * SLOW), 1, "exit code for a taken port: " + server.text())
            truth(flag + "=" in server.text() and "in use" in server.text(), server.text())


@test(own=True)
def scrapes_during_the_end_are_harmless(env, rng):
    """Scrapers hammer while the server ends under load: exit 0, nothing torn down under them."""
    server = env.start(**HTTP)
    port = http_port(server)
    stop = threading.Event()

    def scrape():
        while not stop.is_set():
            try:
                parse(Http(port).get("/metrics")[1])
            except (OSError, http.client.HTTPException):
                stop.wait(0.001)

    threads = [threading.Thread(target=scrape) for _ in range(4)]
    for thread in threads:
        thread.start()
    with server.session() as s:
        sequence = s.create()
        s.append(sequence, random_rows(rng, 10))
        for _ in range(scaled(200)):
            s.attend(sequence, random_q(rng, 1, 8), random_indices(rng, 1, 8, 10, 0))
    server.signal()
    code = server.wait_exit(10 * SLOW)
    stop.set()
    for thread in threads:
        thread.join()
    equal(code, 0, "exit code")


if __name__ == "__main__":
    main()
