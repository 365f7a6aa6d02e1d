"""tlskit.py - authorities and certificates made on the spot, clients that speak TLS, and what a raw handshake comes to."""

import datetime
import ipaddress
import ssl

from dsatest import *  # noqa: F403

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as missing:
    skip_program("needs python3-cryptography (%s)" % missing)


def named(name):
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def pem_of_key(key, password=None):
    how = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how)


class Authority:
    def __init__(self, name):
        self.name, self.key = named(name), ec.generate_private_key(ec.SECP256R1())
        self.cert = self._sign(self.name, self.key, 30, [(x509.BasicConstraints(True, None), True)])
        self.pem = self.cert.public_bytes(serialization.Encoding.PEM)

    def _sign(self, subject, key, days, extensions):
        now = datetime.datetime.utcnow()
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=60))
            .not_valid_after(now + datetime.timedelta(days=days))
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(self.key, hashes.SHA256())

    def issue(self, name="dsad", days=10, usage=ExtendedKeyUsageOID.SERVER_AUTH):
        """(certificate, key) in PEM; days below 0: it has expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [
            x509.DNSName(name),
            x509.DNSName("localhost"),
            x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
        ]
        extensions = [
            (x509.SubjectAlternativeName(names), False),
            (x509.ExtendedKeyUsage([usage]), False),
        ]
        cert = self._sign(named(name), key, days, extensions)
        return cert.public_bytes(serialization.Encoding.PEM), pem_of_key(key)

    def client(self, name="client", days=10):
        return self.issue(name, days, ExtendedKeyUsageOID.CLIENT_AUTH)


def serial_of(pem):
    return x509.load_pem_x509_certificate(pem).serial_number


class Files:
    """A folder with a server's certificate, key and client authorities; replaced as a rotation does, by renaming."""

    def __init__(self, pair=None, client_ca=None):
        self.folder = tempfile.mkdtemp(prefix="dsa-tls-")
        FOLDERS.append(self.folder)
        self.put(pair, client_ca)

    def path(self, name):
        return os.path.join(self.folder, name)

    def write(self, name, data, mode=0o600):
        with open(self.path(name + ".new"), "wb") as f:
            f.write(data)
        os.chmod(self.path(name + ".new"), mode)
        os.rename(self.path(name + ".new"), self.path(name))
        return self.path(name)

    def put(self, pair=None, client_ca=None):
        if pair:
            self.write("cert.pem", pair[0])
            self.write("key.pem", pair[1])
        if client_ca:
            self.write("ca.pem", client_ca)

    def flags(self, mutual=False, **more):
        flags = {
            "tcp": "127.0.0.1:0",
            "tls-cert": self.path("cert.pem"),
            "tls-key": self.path("key.pem"),
            "tls-reload": "0us",
        }
        if mutual:
            flags["tls-client-ca"] = self.path("ca.pem")
        flags.update({k.replace("_", "-"): v for k, v in more.items()})
        return flags


def tls_client(server, authority, pair=None):
    pem, key = pair or (None, None)
    credentials = grpc.ssl_channel_credentials(authority.pem, key, pem)
    return Client("127.0.0.1:%d" % server.port, credentials)


def context_of(authority=None, pair=None, alpn=("h2",), versions=None):
    """A raw client's. Without an authority it believes anyone."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if authority:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=authority.pem.decode())
    if pair:
        with tempfile.NamedTemporaryFile() as f:
            f.write(pair[0] + pair[1])
            f.flush()
            context.load_cert_chain(f.name)
    if alpn:
        context.set_alpn_protocols(list(alpn))
    if versions:
        context.set_ciphers("ALL:@SECLEVEL=0")
        context.minimum_version, context.maximum_version = versions
    return context


def connect_tcp(port):
    s = socket.create_connection(("127.0.0.1", port))
    s.settimeout(10 * SLOW)
    return s


SETTINGS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"


def shake(server, context):
    """A handshake and HTTP/2's first words. The TLS socket, or the exception that says why not: with TLS 1.3 a client
    learns of its certificate's refusal with the first answer only."""
    raw = connect_tcp(server.port)
    try:
        tls = context.wrap_socket(raw)
        tls.sendall(SETTINGS)
        if tls.recv(1) == b"":
            raise ConnectionResetError("closed without a word")
        return tls
    except OSError as error:
        raw.close()
        return error


def served_serial(server):
    """The serial number of the certificate that a new connection sees."""
    tls = shake(server, context_of())
    truth(not isinstance(tls, Exception), "no handshake: %r" % tls)
    with tls:
        return x509.load_der_x509_certificate(tls.getpeercert(True)).serial_number
