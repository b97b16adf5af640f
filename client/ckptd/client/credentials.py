"""What the agents of one run trust one another by: a key, a self-signed certificate and a token, made at start.

Owns: making them. Does not own: telling them (`store_exchange`) or checking them (the agents). Invariant: nothing
here is written to disk or into a log; they die with the run.
"""

from __future__ import annotations

import datetime as dt
import secrets

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from ckptd.protos.agent_pb2 import RunCredentials

SERVER_NAME = "ckptd"
"""Name in the certificate: agents check it instead of host names, since the certificate itself is pinned."""
_LIFETIME = dt.timedelta(days=3650)
_CLOCK_SKEW = dt.timedelta(days=2)


def make_credentials(now: dt.datetime) -> RunCredentials:
    """Return fresh credentials of a run: an EC key (P-256), its certificate and 32 random bytes. Takes milliseconds.

    Args:
        now: With time zone; the certificate is valid around it, with room for clocks that differ.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, SERVER_NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + _LIFETIME)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    return RunCredentials(
        certificate=certificate.public_bytes(serialization.Encoding.PEM),
        private_key=key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
        token=secrets.token_bytes(32),
    )
