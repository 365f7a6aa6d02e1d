#!/usr/bin/python3
"""test_tls.py - TLS on the TCP address: who is served, who is refused and how, certificates that change under load."""

from tlskit import *  # noqa: F403
import http2

CA, OTHER_CA, CLIENT_CA = Authority("authority"), Authority("somebody else"), Authority("clients' authority")
SERVER_PAIR = CA.issue()


def serve(env, pair=SERVER_PAIR, mutual=False, **flags):
    files = Files(pair, CLIENT_CA.pem if mutual else None)
    server = env.start(**files.flags(mutual, **flags))
    server.files = files
    return server


def full_round(client, rng, n_tokens=3600):
    """A session with messages of up to some megabytes both ways; every byte is compared."""
    with Session(client, name="tls") as s:
        sequence = s.create()
        rows = random_rows(rng, n_tokens)
        s.append(sequence, rows)
        stored, _ = quantize(MAIN, rows)
        same_bits(s.export(sequence), stored.view(np.uint8).reshape(n_tokens, -1), "rows that went through TLS")
        q, indices = random_q(rng, 3, 8), random_indices(rng, 3, 64, n_tokens)
        kv = s.export(sequence, dtype=pb.DTYPE_BF16)
        result = s.attend(sequence, q, indices, want_lse=True)
        check_attend(result, *attend_reference(MAIN, q, kv, indices, 0.05), "attend over TLS")


def expect_serving(server, pair=None):
    client = tls_client(server, CA, pair)
    equal(len(client.stats().pools), 1, "pools")
    client.close()


# ---- who is served ----


@test(own=True)
def tls_serves_everything(env, rng):
    server = serve(env)
    for _ in range(2):
        client = tls_client(server, CA)
        full_round(client, rng)
        client.close()
    server.expect_working()  # and the unix socket as ever
    server.expect_empty()
    server.stop()


@test(own=True)
def mutual_tls_serves_those_with_a_certificate(env, rng):
    server = serve(env, mutual=True)
    client = tls_client(server, CA, CLIENT_CA.client())
    full_round(client, rng)
    client.close()
    server.expect_empty()
    server.stop()


@test(own=True)
def versions_and_words(env, rng):
    """1.2 and 1.3 are spoken; a connection is h2 and nothing else."""
    server = serve(env)
    for version, word in ((ssl.TLSVersion.TLSv1_2, "TLSv1.2"), (ssl.TLSVersion.TLSv1_3, "TLSv1.3")):
        tls = shake(server, context_of(CA, versions=(version, version), alpn=("http/1.1", "h2")))
        truth(not isinstance(tls, Exception), "%s: %r" % (word, tls))
        equal((tls.version(), tls.selected_alpn_protocol()), (word, "h2"), "what was agreed")
        truth("GCM" in tls.cipher()[0] or "CHACHA20" in tls.cipher()[0], "cipher %r" % (tls.cipher(),))
        tls.close()
    server.stop()


# ---- who is refused ----


def refusals(pair):
    """name, what the server is heard to say (None: the client refuses), how the client tries."""
    old = ssl.TLSVersion.TLSv1_1
    cbc = context_of(pair=pair)
    cbc.maximum_version = ssl.TLSVersion.TLSv1_2
    cbc.set_ciphers("AES256-SHA:ECDHE-RSA-AES128-SHA:ECDHE-ECDSA-AES128-SHA")
    return [
        ("TLS 1.1", "unsupported protocol", context_of(pair=pair, versions=(old, old))),
        ("no ALPN", "ALPN h2", context_of(pair=pair, alpn=())),
        ("another protocol", "ALPN h2", context_of(pair=pair, alpn=("http/1.1",))),
        ("old ciphers", "no shared cipher", cbc),
        ("the wrong authority", None, context_of(OTHER_CA, pair)),
    ]


def refusals_of_certificates():
    def certain(pair):
        return context_of(CA, pair)

    return [
        ("no certificate", "did not return a certificate", context_of(CA)),
        ("a certificate of another authority", "issuer", certain(OTHER_CA.client())),
        ("an expired certificate", "expired", certain(CLIENT_CA.client(days=-1))),
        ("a server's certificate", "purpose", certain(CLIENT_CA.issue())),
        ("the server's authority's", "self-signed", certain(CA.client())),
    ]


def expect_refused(server, cases, pair):
    for name, said, context in cases:
        before = len(server.text())
        outcome = shake(server, context)
        truth(isinstance(outcome, Exception), "%s was served" % name)
        if said:

            def heard():  # one refusal a second is told in a line of its own
                shake(server, context)
                return said in server.text()[before:]

            wait_until(heard, 10 * SLOW, "%s: a line with %r; has %r" % (name, said, server.text()[before:]))
            truth(isinstance(outcome, ssl.SSLError), "%s: no alert, but %r" % (name, outcome))
        expect_serving(server, pair)


@test(own=True)
def strangers_are_refused(env, rng):
    server = serve(env)
    before = server.n_fds()
    expect_refused(server, refusals(None), None)
    wait_until(lambda: server.n_fds() <= before, 10 * SLOW, "descriptors come back")
    server.stop()


@test(own=True)
def strangers_without_the_right_certificate_are_refused(env, rng):
    server = serve(env, mutual=True)
    pair = CLIENT_CA.client()
    expect_serving(server, pair)
    expect_refused(server, refusals_of_certificates() + refusals(pair), pair)
    server.stop()


@test(own=True)
def clients_refuse_an_expired_server(env, rng):
    expired = time.time() + 3 * SLOW
    server = serve(env, pair=CA.issue(days=3 * SLOW / 86400))
    wait_until(lambda: time.time() > expired, 5 * SLOW, "the certificate expires while it is in use")
    outcome = shake(server, context_of(CA))
    truth("expired" in str(outcome), "the client says %r" % outcome)
    for authority in (CA, OTHER_CA):
        client = tls_client(server, authority)
        try:
            client.stats(timeout=2)
            fail("served with an expired certificate")
        except grpc.RpcError as error:
            truth(error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED), "%s" % error)
        client.close()
    server.expect_working()
    server.stop()


@test(own=True)
def plain_text_meets_tls_and_garbage(env, rng):
    server = serve(env)
    before = server.n_fds()
    plain = Client("127.0.0.1:%d" % server.port)
    try:
        plain.stats(timeout=5 * SLOW)
        fail("plain text was served on a TLS port")
    except grpc.RpcError as error:
        truth(error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED), "%s" % error)
    plain.close()
    wait_until(lambda: "plain text where TLS is spoken" in server.text(), 5 * SLOW, "the log says so")
    hello = client_hello()
    samples = [b"\0", b"GET / HTTP/1.1\r\n\r\n", SETTINGS, bytes(5000), hello + hello, hello + bytes(70000)]
    samples += [rng.bytes(int(rng.integers(1, 5000))) for _ in range(scaled(100, 20))]
    samples += [hello[:n] + rng.bytes(50) for n in rng.integers(1, len(hello), scaled(100, 20))]
    for sample in samples:
        raw = connect_tcp(server.port)
        try:
            raw.sendall(sample)
            if rng.random() < 0.5:
                raw.shutdown(socket.SHUT_WR)
                while raw.recv(4096):
                    pass
        except ConnectionError:
            pass
        raw.close()
    expect_serving(server)
    wait_until(lambda: server.n_fds() <= before, 20 * SLOW, "descriptors come back")
    server.stop()


def client_hello():
    """The bytes that a client begins with."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        context_of().wrap_bio(incoming, outgoing).do_handshake()
    except ssl.SSLWantReadError:
        pass
    return outgoing.read()


@test(own=True)
def slow_handshakes_end(env, rng):
    server = serve(env, tls_handshake_timeout="400ms")
    before = server.n_fds()
    hello = client_hello()
    held = [connect_tcp(server.port) for _ in range(20)]
    for i, raw in enumerate(held):
        raw.sendall(hello[: i * 10])  # from nothing to a part
    expect_serving(server)
    for raw in held:
        try:
            equal(raw.recv(1), b"", "what a silent client is told")
        except ConnectionResetError:
            pass
        raw.close()
    wait_until(lambda: server.n_fds() <= before, 5 * SLOW, "descriptors come back")
    server.stop()


# ---- certificates that change ----


class Load:
    """Clients that call without pause, some on one connection, some on a new one each time. Any failure is kept."""

    def __init__(self, server, pair=None):
        self.failures, self.n_calls, self.n_connections, self.ends = [], 0, 0, False
        self.threads = [
            threading.Thread(target=self.run, args=(server, pair, stays), daemon=True)
            for stays in (True, True, False, False)
        ]
        for thread in self.threads:
            thread.start()

    def run(self, server, pair, stays):
        client = None
        while not self.ends:
            try:
                if client is None:
                    client = tls_client(server, CA, pair)
                    self.n_connections += 1
                client.stats()
                self.n_calls += 1
            except Exception as error:  # noqa: B902: it is judged below
                self.failures.append(error)
            if not stays:
                client.close()
                client = None

    def stop(self):
        self.ends = True
        for thread in self.threads:
            thread.join(60 * SLOW)
        equal([str(f) for f in self.failures], [], "failed calls of %d" % self.n_calls)


@test(own=True)
def rotation_under_load(env, rng):
    """20 certificates one after the other under load: no call fails, each new connection sees the newest, streams go on."""
    server = serve(env, mutual=True)
    pair = CLIENT_CA.client()
    client = tls_client(server, CA, pair)
    with Session(client, name="through all of them") as s:
        load = Load(server, pair)
        for n in range(1, scaled(20, 4) + 1):
            new = CA.issue("generation %d" % n)
            server.files.put(new)
            server.signal(signal.SIGHUP)
            wait_until(lambda: seen(server, pair) == serial_of(new[0]), 10 * SLOW, "the new certificate is served")
            sequence = s.create()
            s.release(sequence)
            target = load.n_connections + 2
            wait_until(lambda: load.n_connections >= target, 20 * SLOW, "new connections in the load")
        load.stop()
        print("     %d calls, %d connections" % (load.n_calls, load.n_connections))
    client.close()
    server.expect_working()
    server.stop()


def seen(server, pair):
    tls = shake(server, context_of(CA, pair))
    truth(not isinstance(tls, Exception), "no handshake: %r" % tls)
    with tls:
        return x509.load_der_x509_certificate(tls.getpeercert(True)).serial_number


@test(own=True)
def bad_files_keep_the_old_certificate(env, rng):
    server = serve(env)
    serial = serial_of(SERVER_PAIR[0])
    other = CA.issue()
    bad = [
        ((b"", SERVER_PAIR[1]), "the file is empty"),
        ((b"garbage", SERVER_PAIR[1]), "no usable certificate"),
        ((SERVER_PAIR[0], b"garbage"), "no key in PEM"),
        ((SERVER_PAIR[0], other[1]), "not the key of the certificate"),
        ((SERVER_PAIR[0], pem_of_key(ec.generate_private_key(ec.SECP256R1()), b"password")), "without a password"),
        ((other[0], SERVER_PAIR[1]), "not the key of the certificate"),
        (CA.issue(days=-1), "the certificate has expired"),
    ]
    for pair, word in bad:
        before = len(server.text())
        server.files.put(pair)
        server.signal(signal.SIGHUP)
        wait_until(lambda: word in server.text()[before:], 10 * SLOW, "a line with %r: %s" % (word, server.text()))
        equal(served_serial(server), serial, "the certificate after " + word)
    os.unlink(server.files.path("key.pem"))
    before = len(server.text())
    server.signal(signal.SIGHUP)
    wait_until(lambda: "cannot be read" in server.text()[before:], 10 * SLOW, "a line on the missing file")
    expect_serving(server)
    server.files.put(other)
    server.signal(signal.SIGHUP)
    wait_until(lambda: served_serial(server) == serial_of(other[0]), 10 * SLOW, "the good one is taken at last")
    server.stop()


@test(own=True)
def files_are_looked_at_without_a_signal(env, rng):
    server = serve(env, tls_reload="1s")
    new = CA.issue()
    server.files.write("cert.pem", new[0])  # half a rotation: refused, and looked at again
    wait_until(lambda: "not the key of the certificate" in server.text(), 10 * SLOW, "half a pair is refused")
    server.files.write("key.pem", new[1])
    wait_until(lambda: served_serial(server) == serial_of(new[0]), 10 * SLOW, "the timer finds the new files")
    truth("certificate replaced" in server.text(), "the log says so")
    server.stop()


@test(own=True)
def rotation_of_a_mounted_secret(env, rng):
    """As Kubernetes does it: the files are links into a folder that is a link itself, which is replaced by renaming."""
    root, pairs = Files(), [CA.issue() for _ in range(4)]

    def mount(n):
        folder = Files(pairs[n]).folder
        os.symlink(folder, root.path("..data.new"))
        os.rename(root.path("..data.new"), root.path("..data"))

    mount(0)
    for name in ("cert.pem", "key.pem"):
        os.symlink(os.path.join("..data", name), root.path(name))
    server = env.start(**root.flags(tls_reload="1s"))
    client = tls_client(server, CA)
    with Session(client, name="through all of them") as s:
        for n in range(1, len(pairs)):
            mount(n)
            wait_until(
                lambda: served_serial(server) == serial_of(pairs[n][0]), 10 * SLOW, "certificate %d is served" % n
            )
            s.release(s.create())
    client.close()
    truth("not taken" not in server.text(), "a half pair was seen: %s" % server.text())
    server.stop()


# ---- the door ----

TOKEN, SECOND = "a-token-of-25-characters.", "another-token/with+all=chars~_"


def with_token(server, token, credentials=None):
    """A client whose calls carry `authorization: Bearer token`, over plain TCP unless there are credentials."""
    client = Client("127.0.0.1:%d" % server.port, credentials)

    class Interceptor(grpc.UnaryUnaryClientInterceptor):
        def intercept_unary_unary(self, go_on, details, request):
            return go_on(details._replace(metadata=[("authorization", token)]), request)

    if token is not None:
        client.channel = grpc.intercept_channel(client.channel, Interceptor())
    return client


def outcome(call):
    try:
        call()
        return "OK", None
    except grpc.RpcError as error:
        refused = refused_from(error)
        return error.code().name, refused.status.reason if refused else None


@test(own=True)
def tokens_are_wanted_on_tcp(env, rng):
    files = Files()
    path = files.write("tokens", (TOKEN + "\n" + SECOND + "\n").encode())
    for encrypted in (False, True):
        flags = Files(SERVER_PAIR).flags() if encrypted else {"tcp": "127.0.0.1:0"}
        server = env.start(**{**flags, "auth-token-file": path})
        credentials = grpc.ssl_channel_credentials(CA.pem) if encrypted else None
        for token, want in (
            ("Bearer " + TOKEN, "OK"),
            ("bearer " + SECOND, "OK"),
            (None, "UNAUTHENTICATED"),
            ("Bearer " + TOKEN[:-1], "UNAUTHENTICATED"),
            ("Bearer " + TOKEN + "x", "UNAUTHENTICATED"),
            ("Basic " + TOKEN, "UNAUTHENTICATED"),
            ("Bearer", "UNAUTHENTICATED"),
        ):
            client = with_token(server, token, credentials)
            got, reason = outcome(client.stats)
            equal(got, want, "a call with %r" % token)
            equal(reason, None if want == "OK" else "UNAUTHENTICATED", "the reason")
            equal(client.health().status, 1, "health needs no token")
            client.close()
        client = with_token(server, None, credentials)
        try:
            Session(client)
            fail("a stream without a token was taken")
        except grpc.RpcError as error:
            equal(error.code(), grpc.StatusCode.UNAUTHENTICATED, "a stream's code")
        client.close()
        server.expect_working()  # the unix socket wants none
        server.expect_empty()
        server.stop()


@test(own=True)
def tokens_are_reloaded(env, rng):
    files = Files()
    path = files.write("tokens", TOKEN.encode())
    server = env.start(**{"tcp": "127.0.0.1:0", "auth-token-file": path})
    old, new = with_token(server, "Bearer " + TOKEN), with_token(server, "Bearer " + SECOND)
    equal((outcome(old.stats)[0], outcome(new.stats)[0]), ("OK", "UNAUTHENTICATED"), "before")
    files.write("tokens", SECOND.encode(), mode=0o644)
    server.signal(signal.SIGHUP)
    wait_until(lambda: "every user can read" in server.text(), 10 * SLOW, "a world-readable file is refused")
    equal((outcome(old.stats)[0], outcome(new.stats)[0]), ("OK", "UNAUTHENTICATED"), "after a refused file")
    files.write("tokens", SECOND.encode())
    server.signal(signal.SIGHUP)
    wait_until(lambda: outcome(new.stats)[0] == "OK", 10 * SLOW, "the new token is taken")
    equal(outcome(old.stats)[0], "UNAUTHENTICATED", "the old token")
    server.stop()


@test(own=True)
def drain_is_for_the_unix_socket(env, rng):
    for encrypted in (False, True):
        flags = Files(SERVER_PAIR).flags() if encrypted else {"tcp": "127.0.0.1:0"}
        credentials = grpc.ssl_channel_credentials(CA.pem) if encrypted else None
        server = env.start(**flags)
        client = with_token(server, None, credentials)
        equal(outcome(lambda: client.call("Drain")), ("PERMISSION_DENIED", "ACCESS_DENIED"), "Drain over TCP")
        client.close()
        server.expect_working()
        server.stop()
        server = env.start(**{**flags, "admin": "any"})
        client = with_token(server, None, credentials)
        client.call("Drain")
        equal(server.wait_exit(10 * SLOW), 0, "exit code after Drain over TCP")
        client.close()


def check_config(env, **flags):
    command = [env.dsad, "--check-config"] + ["--%s=%s" % item for item in flags.items()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20 * SLOW)
    return done.returncode, done.stderr


@test(own=True)
def half_a_configuration_is_refused(env, rng):
    files = Files(SERVER_PAIR, CLIENT_CA.pem)
    cert, key, ca = files.path("cert.pem"), files.path("key.pem"), files.path("ca.pem")
    other, old = Files(CA.issue()), Files(CA.issue(days=-1))
    open_tokens = files.write("tokens", TOKEN.encode(), mode=0o644)
    good = files.write("good", TOKEN.encode())
    short = files.write("short", b"abc")
    for flags, words in (
        ({"tls-cert": cert}, ["tls-key", "tls-cert needs it"]),
        ({"tls-key": key}, ["tls-cert", "tls-key needs it"]),
        ({"tls-client-ca": ca}, ["tls-cert", "tls-client-ca needs it"]),
        ({"tls-cert": cert, "tls-key": "/nonexistent"}, ["tls-key", "cannot be read"]),
        ({"tls-cert": "/nonexistent", "tls-key": key}, ["tls-cert", "cannot be read"]),
        ({"tls-cert": cert, "tls-key": other.path("key.pem")}, ["tls-key", "not the key"]),
        ({"tls-cert": cert, "tls-key": key, "tls-client-ca": key}, ["tls-client-ca", "no certificate"]),
        ({"tls-cert": old.path("cert.pem"), "tls-key": old.path("key.pem")}, ["tls-cert", "has expired"]),
        ({"tls-cert": files.folder, "tls-key": key}, ["tls-cert", "not a file"]),
        ({"auth-token-file": open_tokens}, ["auth-token-file", "every user can read", "644"]),
        ({"auth-token-file": short}, ["auth-token-file", "line 1"]),
        ({"auth-token-file": "/nonexistent"}, ["auth-token-file", "cannot be read"]),
        ({"admin": "tcp"}, ["admin", "unix or any"]),
        ({"socket-owner": "no-such-user"}, ["socket-owner", "no such user"]),
        ({"socket-owner": "0:no-such-group"}, ["socket-owner", "no such group"]),
        ({"socket-owner": "0:"}, ["socket-owner", "user:group"]),
    ):
        code, said = check_config(env, **flags)
        equal(code, 2, "exit code for %r (%s)" % (flags, said))
        for word in words:
            truth(word in said, "%r says %r, without %r" % (flags, said, word))
    code, said = check_config(
        env,
        **{
            "tls-cert": cert,
            "tls-key": key,
            "tls-client-ca": ca,
            "auth-token-file": good,
            "socket-owner": "root:nogroup",
            "admin": "any",
        },
    )
    equal((code, said), (0, ""), "a sound configuration")


@test(own=True)
def sockets_have_the_owner_that_was_asked_for(env, rng):
    if os.geteuid() != 0:
        raise Skip("only root can give sockets away")
    for text, want in (("12345:23456", (12345, 23456)), (":65534", (0, 65534)), ("nobody", (65534, 0))):
        server = env.start(**{"socket-owner": text})
        for path in (server.path, server.path + ".fd"):
            st = os.stat(path)
            equal((st.st_uid, st.st_gid), want, "the owner of %s with %s" % (path, text))
        server.expect_working()
        server.stop()


@test(own=True)
def plain_text_beyond_loopback_is_warned_about(env, rng):
    for flags, warned in (({"tcp": "0.0.0.0:0"}, True), (Files(SERVER_PAIR).flags(tcp="0.0.0.0:0"), False)):
        server = env.start(**flags)
        line = re.search(r"^\S+ warn .*leaves loopback.*", server.text(), re.M)
        equal(line is not None, warned, "a warning with %r" % flags)
        for word in ("0.0.0.0:0", "tls-cert", "auth-token-file") if warned else ():
            truth(word in line.group(0), "the warning %r names %s" % (line.group(0), word))
        server.stop()


# ---- dsactl ----


def dsactl(env, server, *words, target=None, patience_ms=1500 * SLOW):
    target = target or "127.0.0.1:%d" % server.port
    command = [env.dsactl, words[0], "--target", target, "--connect-timeout-ms", str(patience_ms), *words[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120 * SLOW)
    return done.returncode, done.stdout + done.stderr


@test(own=True)
def dsactl_speaks_tls(env, rng):
    files = Files(CA.issue("dsad.example"), CLIENT_CA.pem)
    own, other = Files(CLIENT_CA.client(), CA.pem), Files(OTHER_CA.client(), OTHER_CA.pem)
    token, wrong = own.write("token", TOKEN.encode()), own.write("wrong", SECOND.encode())
    server = env.start(**files.flags(True, auth_token_file=files.write("tokens", TOKEN.encode())))
    ca = ["--tls-ca", own.path("ca.pem")]
    pair = ["--tls-cert", own.path("cert.pem"), "--tls-key", own.path("key.pem")]
    right = [*ca, *pair, "--token-file", token]
    for words in (
        ("info",),
        ("wait",),
        ("attend",),
        ("verify", "--cases", "20"),
        ("load", "--requests", "200", "--transport", "inline"),
        ("load", "--requests", "200", "--transport", "memfd"),
        ("info", "--tls-name", "dsad.example"),
        ("info", "--tls"),
    ):
        code, said = dsactl(env, server, *words, *right)
        equal(code, 0, "exit code of dsactl %r: %s" % (words, said))
    for words, want, word in (
        (["--tls-ca", other.path("ca.pem"), *pair, "--token-file", token], 3, "certificate verify failed"),
        (["--tls", *pair, "--token-file", token], 3, "certificate verify failed"),
        ([*ca, "--token-file", token], 3, "CONNECT"),
        ([*ca, "--tls-cert", other.path("cert.pem"), "--tls-key", other.path("key.pem")], 3, "CONNECT"),
        ([*right, "--tls-name", "elsewhere.example"], 3, "elsewhere.example"),
        ([*ca, *pair], 3, "UNAUTHENTICATED"),
        ([*ca, *pair, "--token-file", wrong], 3, "UNAUTHENTICATED"),
        ([], 3, "CONNECT"),
        (["--tls-ca", "/nonexistent"], 3, "tls.ca_file"),
        ([*ca, "--tls-cert", own.path("cert.pem")], 3, "need each other"),
        ([*ca, "--token-file", "/nonexistent"], 3, "token_file"),
    ):
        code, said = dsactl(env, server, "info", *words, patience_ms=3000 if SANITIZED else 1500)
        equal(code, want, "exit code with %r: %s" % (words, said))
        text = said if word in said else said.lower().replace("_", " ")  # BoringSSL's words are OpenSSL's in capitals
        truth(word in text, "%r says %r, without %r" % (words, said, word))
    code, said = dsactl(env, server, "info", *ca, target="unix:" + server.path)
    truth(code == 3 and "unix socket speaks plain text" in said, "TLS over a unix socket: %d %s" % (code, said))
    code, said = dsactl(env, server, "drain", *right)
    truth(code == 1 and "ACCESS_DENIED" in said, "drain over TCP: %d %s" % (code, said))
    server.expect_empty()
    equal(dsactl(env, server, "drain", target="unix:" + server.path)[0], 0, "drain over the unix socket")
    equal(server.wait_exit(10 * SLOW), 0, "exit code after the drain")


# ---- peers that misbehave ----


@test(own=True)
def deaf_clients_hold_little(env, rng):
    """NET-01 through TLS: clients that ask for much and read nothing; one then reads all, and it is right."""
    n, tokens = full(20, 4), 65536 if not SANITIZED else 8192
    server = serve(env, pool_pages=tokens // 64 + 64, stall_timeout="600s")
    with server.session(name="owner") as s:
        sequence = s.create()
        stored = quantize(MAIN, random_rows(rng, 512))[0]
        for at in range(0, tokens, 512):
            s.import_rows(sequence, stored)
        before, fds = server.rss(), server.n_fds()
        clients = [tls_client(server, CA) for _ in range(n)]
        request = pb.ExportRowsRequest(session=s.token, sequence_id=sequence, dtype=pb.DTYPE_BF16)
        exports = [c.export(request, timeout=None) for c in clients]
        for export in exports:
            equal(next(export).first, 0, "the first chunk")
        for _ in range(scaled(200, 10)):
            equal(s.get(sequence).n_tokens, tokens, "a normal client among deaf ones")
        grown, bound = server.rss() - before, n * (3 << 20) + (16 << 20)
        print("     grown by %d MiB, bound %d MiB, asked for %d MiB" % (grown >> 20, bound >> 20, n * tokens * 1152 >> 20))
        if not SANITIZED:
            truth(grown < bound, "the server grew by %d MiB" % (grown >> 20))
        expected, at = dequantize(MAIN, stored), None
        for chunk in exports[0]:
            at = chunk.first if at is None else at
            equal(chunk.first, at, "chunks follow one another")
            rows = np.frombuffer(chunk.rows, np.uint16).reshape(-1, MAIN.d_qk)
            same_bits(rows, np.take(expected, np.arange(at, at + len(rows)) % 512, axis=0), "rows at %d" % at)
            at += len(rows)
        equal(at, tokens, "rows in all")
        for client in clients:
            client.close()
        wait_until(lambda: server.n_fds() <= fds, 10 * SLOW, "descriptors come back")
    server.expect_empty()
    server.stop()


@test(own=True)
def a_stuck_peer_is_let_go(env, rng):
    """Clients that stop reading for good, on each socket: the streams stall, and at the end the server does not wait for them."""
    flags = {"pool-pages": 1100, "stall-timeout": "500ms", "drain-grace": "200ms"}
    for kind in ("tls", "tcp", "unix"):
        server = env.start(**{**(Files(SERVER_PAIR).flags() if kind == "tls" else {"tcp": "127.0.0.1:0"}), **flags})
        stuck = stuck_peer(server, kind, rng)
        server.expect_empty()
        server.stop()
        stuck.close()


def stuck_peer(server, kind, rng):
    with server.session(name="owner") as s:
        sequence = s.create()
        stored = quantize(MAIN, random_rows(rng, 512))[0]
        for _ in range(128 if not SANITIZED else 64):
            s.import_rows(sequence, stored)
        message = pb.ExportRowsRequest(
            session=s.token, sequence_id=sequence, dtype=pb.DTYPE_BF16
        ).SerializeToString()
        peer = http2.connect(server.path if kind == "unix" else ("127.0.0.1", server.port))
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer = context_of(CA).wrap_socket(peer) if kind == "tls" else peer
        # windows as large as they come, so that TCP and not HTTP/2 is what blocks
        peer.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            + http2.frame(4, 0, 0, struct.pack(">HI", 4, 2**31 - 1))
            + http2.frame(8, 0, 0, struct.pack(">I", 2**31 - 65536))
            + http2.frame(1, 4, 1, http2.header_block("/%s/ExportRows" % SERVICE))
            + http2.frame(0, 1, 1, b"\0" + struct.pack(">I", len(message)) + message)
        )
        wait_until(lambda: "does not read" in server.text(), 20 * SLOW, "the stream stalls")
        if kind == "tls":
            expect_serving(server)
    return peer


@test(own=True)
def connect_and_reset(env, rng):
    """50,000 connections that are reset at once, half in plain text, half on the TLS port at every stage of a handshake: the
    server goes on serving meanwhile and afterwards, and holds no descriptor of theirs."""
    n = full(50000, 3000)
    hello = client_hello()
    stages = [b"", b"", b"\x16", hello[: len(hello) // 2], hello]
    for encrypted in (False, True):
        server = serve(env) if encrypted else env.start(tcp="127.0.0.1:0")
        address = ("127.0.0.1", server.port)
        if encrypted:
            expect_serving(server)
        before, memory = server.n_fds(), server.rss()
        hard = struct.pack("ii", 1, 0)
        served = 0
        for i in range(n // 2):
            raw = socket.socket()
            raw.connect(address)
            data = stages[i % len(stages)] if encrypted else SETTINGS[: i % 30]
            if data:
                raw.sendall(data)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, hard)
            raw.close()
            if i % 2000 == 0:
                equal(len(server.control.stats().pools), 1, "an answer meanwhile")
                served += 1
        wait_until(lambda: server.n_fds() <= before, 20 * SLOW, "descriptors come back: %d" % server.n_fds())
        print("     %s: %d times served meanwhile, grown by %d KiB" % (
            "TLS" if encrypted else "plain", served, (server.rss() - memory) >> 10))
        if not SANITIZED:
            truth(server.rss() - memory < 32 << 20, "the server grew by %d MiB" % ((server.rss() - memory) >> 20))
        client = tls_client(server, CA) if encrypted else Client("127.0.0.1:%d" % server.port)
        full_round(client, rng, 700)
        client.close()
        server.expect_working()
        server.expect_empty()
        server.stop()


@test(own=True)
def out_of_descriptors_with_tls(env, rng):
    """`ulimit -n` reached by TLS connections, silent ones and served ones: once they are gone it serves again."""
    server = serve(env, nofile=96, max_connections=1000)
    server.expect_error("cannot accept|no memory or descriptor|Too many open files|EMFILE")
    expect_serving(server)
    before = server.n_fds()
    for kind in ("silent", "served"):
        held = []
        while server.n_fds() < 90:
            held.append(connect_tcp(server.port))
            if kind == "served":
                held[-1] = context_of(CA).wrap_socket(held[-1], do_handshake_on_connect=False)
                try:
                    held[-1].settimeout(0.2 * SLOW)  # at the limit nobody answers any more
                    held[-1].do_handshake()
                except OSError:
                    break
        held += [connect_tcp(server.port) for _ in range(60)]
        equal(len(server.control.stats().pools), 1, "open connections are served meanwhile")
        for connection in held:
            connection.close()
        wait_until(lambda: server.n_fds() <= before + 2, 20 * SLOW, "the descriptors come back after " + kind)
        expect_serving(server)
    full_round(tls_client(server, CA), rng, 700)
    server.expect_working()
    server.stop()


@test(own=True)
def the_cap_counts_tls_connections(env, rng):
    server = serve(env, max_connections=8)
    held = [connect_tcp(server.port) for _ in range(30)]
    wait_until(lambda: "max-connections reached" in server.text(), 10 * SLOW, "the cap is told")
    for connection in held:
        connection.close()

    def served():
        tls = shake(server, context_of(CA))
        return not isinstance(tls, Exception) and (tls.close() or True)

    wait_until(served, 10 * SLOW, "connections are taken again")
    expect_serving(server)
    server.stop()


@test(own=True)
def killed_clients_leave_nothing(env, rng):
    """Connections that are reset at any point of a session over TLS: everything comes back."""
    server = serve(env)
    expect_serving(server)
    before = server.n_fds()
    for _ in range(scaled(60, 10)):
        raw = connect_tcp(server.port)
        tls = context_of(CA).wrap_socket(raw)
        data = http2.call("/%s/OpenSession" % SERVICE, b"\0\0\0\0\0")
        tls.sendall(data[: int(rng.integers(1, len(data) + 1))])
        if rng.random() < 0.3:
            tls.recv(1)
        raw_reset(tls)
    wait_until(lambda: server.n_fds() <= before, 10 * SLOW, "descriptors come back")
    expect_serving(server)
    server.expect_empty()
    server.stop()


def raw_reset(s):
    """Ends a connection with a reset."""
    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    s.close()


@test(own=True)
def sigterm_under_tls_loses_nothing(env, rng):
    """Calls run over TLS while the server is told to go: those that it took are answered, and it leaves in time."""
    for _ in range(scaled(10, 2)):
        server = serve(env)
        client = tls_client(server, CA)
        expect_serving(server)
        calls = [client.channel.unary_unary(
            "/%s/GetStats" % SERVICE, request_serializer=bytes, response_deserializer=pb.Stats.FromString
        ).future(b"", timeout=20 * SLOW) for _ in range(50)]
        calls[0].result()
        server.signal()
        codes = [call.code() for call in calls]
        truth(
            set(codes) <= {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE},
            "codes %r" % set(codes),
        )
        equal(server.wait_exit(10 * SLOW), 0, "exit code")
        server.check_log()
        client.close()


if __name__ == "__main__":
    main()
