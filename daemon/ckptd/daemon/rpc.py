"""Channels, servers and errors of gRPC: set up in one place.

Owns: channel and server options (keepalive, proxies, ports), TLS pinned to a run's own certificate, the token check, and
how an `Error` travels in a status. Does not own: any service. Both ends take their keepalive from here, so that
no server ever calls a client's pings too many, and their limit of a message (`limits`), so that none refuses what the other says.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import ssl
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn

import grpc
import grpc.aio
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from ckptd.daemon.errors import DaemonError, make_error
from ckptd.protos import error_pb2, limits
from ckptd.protos.agent_pb2 import RunCredentials
from ckptd.protos.error_pb2 import Error, Reason
from ckptd.protos.failpoints import failpoint

ERROR_METADATA = "ckptd-error-bin"
TOKEN_METADATA = "ckptd-token-bin"  # noqa: S105 - the name of the metadata entry, not a token
PIECE_BYTES = (4 << 20) - (64 << 10)
"""Bytes of data in one streamed message: below 4 MiB, which is all that older clients take, with room for the rest."""
MAX_SOCKET_PATH = 107
"""sun_path of Linux, less the final zero."""

_KEEPALIVE_MS, _PING_TIMEOUT_MS = 20_000, 10_000
# Long enough for a line of a second, or a host that is out of breath; short enough to try anew soon after a cut.
_CONNECT_MS = 5_000
_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.enable_http_proxy", 0),  # http_proxy in the environment would catch calls to localhost
    ("grpc.so_reuseport", 0),  # two servers must never share a port silently
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    # Both: the connection of a peer that is stopped, but whose kernel goes on to acknowledge, ends after the longer
    # of the two, and the second is a minute by default.
    ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    # What its name does not say: the longest time one attempt may take, TCP, TLS and all. Pauses are the other two.
    ("grpc.min_reconnect_backoff_ms", _CONNECT_MS),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    *limits.MESSAGE_OPTIONS,
]

_CODES: dict[int, grpc.StatusCode] = {
    error_pb2.REASON_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    error_pb2.REASON_DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
    error_pb2.REASON_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    error_pb2.REASON_CORRUPT: grpc.StatusCode.DATA_LOSS,
    error_pb2.REASON_PERMISSION_DENIED: grpc.StatusCode.PERMISSION_DENIED,
    error_pb2.REASON_NO_SPACE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    error_pb2.REASON_INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    error_pb2.REASON_INTERNAL: grpc.StatusCode.INTERNAL,
}


def new_server() -> grpc.aio.Server:
    """Return a server with the options of this module."""
    return grpc.aio.server(options=_OPTIONS)


def server_credentials(credentials: RunCredentials) -> grpc.ServerCredentials:
    """Return the server side of a run's TLS."""
    return grpc.ssl_server_credentials([(credentials.private_key, credentials.certificate)])


def pinned_channel(endpoint: str, certificate: bytes) -> grpc.aio.Channel:
    """Return a channel that trusts this one certificate (PEM) and nothing else, whatever name the host has."""
    return grpc.aio.secure_channel(
        endpoint,
        grpc.ssl_channel_credentials(root_certificates=certificate),
        options=[*_OPTIONS, ("grpc.ssl_target_name_override", _subject_name(certificate))],
    )


def _subject_name(certificate: bytes) -> str:
    """Return the first DNS name of the certificate: gRPC insists on checking one."""
    names = x509.load_pem_x509_certificate(certificate).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return names.value.get_values_for_type(x509.DNSName)[0]


def endpoint_of(host: str, port: int) -> str:
    """Return "host:port", with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def certificate_sha256(certificate: bytes) -> str:
    """Return the SHA-256 (hex) of the certificate's DER, from its PEM."""
    return hashlib.sha256(x509.load_pem_x509_certificate(certificate).public_bytes(Encoding.DER)).hexdigest()


def shown_certificate(endpoint: str, *, timeout_s: float) -> bytes:
    """Return the PEM of the certificate a server shows, trusting nothing; blocking.

    Raises:
        OSError: nobody listens, or it is no TLS server.
    """
    host, _, port = endpoint.rpartition(":")
    return ssl.get_server_certificate((host.strip("[]"), int(port)), timeout=timeout_s).encode()


def has_token(context: grpc.aio.ServicerContext[Any, Any], token: bytes) -> bool:
    """Say whether the caller showed the run's token, in constant time."""
    shown = dict(context.invocation_metadata() or ()).get(TOKEN_METADATA, b"")
    return hmac.compare_digest(shown if isinstance(shown, bytes) else shown.encode(), token)


def token_metadata(credentials: RunCredentials) -> list[tuple[str, bytes]]:
    """Return the metadata that shows the run's token."""
    return [(TOKEN_METADATA, credentials.token)]


# ---------------------------------------------------------------- errors


_MAX_DETAILS_BYTES = 512
_MAX_TEXT_BYTES = 1024
_MAX_RANKS = 512


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: Error) -> NoReturn:
    """End the call with this error, cut to what a status can carry."""
    code = _CODES.get(error.reason, grpc.StatusCode.FAILED_PRECONDITION)
    short = cut(error, _MAX_TEXT_BYTES)
    # Details are percent-encoded on the wire: up to three bytes for each.
    details = _cut_text(error.message, _MAX_DETAILS_BYTES)
    await context.abort(code, details, trailing_metadata=((ERROR_METADATA, short.SerializeToString()),))
    raise AssertionError("abort does not return")


def cut(error: Error, text_bytes: int = 32 << 10) -> Error:
    """Return the error with texts no longer than that, the message twice as long.

    Whatever a rank says is cut before it is told to others or written. In metadata it must be short: gRPC drops a status beyond
    8 KiB, and the reason with it.
    """
    short = Error()
    short.CopyFrom(error)
    short.message = _cut_text(error.message, 2 * text_bytes)
    short.hint = _cut_text(error.hint, text_bytes)
    short.object = _cut_text(error.object, text_bytes)
    del short.ranks[_MAX_RANKS:]
    return short


def _cut_text(text: str, limit: int) -> str:
    data = text.encode()
    return text if len(data) <= limit else data[: limit - 3].decode(errors="ignore") + "…"


def error_of(failure: BaseException) -> Error:
    """Return the `Error` in an exception: of this daemon, of a peer's status, or a new one."""
    if isinstance(failure, DaemonError):
        return failure.error
    if isinstance(failure, grpc.aio.AioRpcError):
        for key, value in failure.trailing_metadata() or ():
            if key == ERROR_METADATA and isinstance(value, bytes):
                return Error.FromString(value)
        reason: Reason.ValueType = error_pb2.REASON_UNAVAILABLE
        if failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            reason = error_pb2.REASON_DEADLINE_EXCEEDED
        if failure.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
            reason = error_pb2.REASON_PERMISSION_DENIED
        return make_error(reason, f"peer: {failure.code().name}: {failure.details()}")
    return make_error(error_pb2.REASON_INTERNAL, f"{type(failure).__name__}: {failure}")


def guarded(
    method: Callable[[Any, Any, grpc.aio.ServicerContext[Any, Any]], Awaitable[Any]],
) -> Callable[[Any, Any, grpc.aio.ServicerContext[Any, Any]], Awaitable[Any]]:
    """Turn an exception of a unary method of the agent into a status with an `Error`, between two failpoints."""

    async def call(servicer: Any, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            failpoint("agent.received_", method.__name__)
            reply = await method(servicer, request, context)
            failpoint("agent.before_reply_", method.__name__)
            return reply
        except (grpc.aio.AbortError, GeneratorExit):
            raise
        except Exception as failure:  # the boundary: everything becomes a status
            await abort(context, error_of(failure))

    call.__name__ = method.__name__
    return call


def guarded_stream(method: Callable[..., Any]) -> Callable[..., Any]:
    """Turn an exception of a streaming method of the agent into a status with an `Error`, between two failpoints."""

    async def call(servicer: Any, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            failpoint("agent.received_", method.__name__)
            is_first = True
            async for part in method(servicer, request, context):
                if is_first:
                    failpoint("agent.before_reply_", method.__name__)
                    is_first = False
                yield part
        except (grpc.aio.AbortError, GeneratorExit):
            raise
        except Exception as failure:  # the boundary: everything becomes a status
            await abort(context, error_of(failure))

    call.__name__ = method.__name__
    return call


# ---------------------------------------------------------------- sockets


def prepare_socket(path: Path) -> None:
    """Make way for a server's Unix socket: a stale one of a dead server is removed.

    Raises:
        DaemonError: the path is too long, or a living server listens there.
    """
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH:
        raise DaemonError.of(
            f"socket path {path} has {length} bytes; Unix sockets allow {MAX_SOCKET_PATH}",
            reason=error_pb2.REASON_INVALID_ARGUMENT,
            hint="set CKPTD_RUN_DIR to a shorter folder",
            object=str(path),
        )
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise DaemonError.of(
            f"{path} is in the way: it is not a socket",
            reason=error_pb2.REASON_INVALID_ARGUMENT,
            hint="remove it, or set CKPTD_RUN_DIR",
            object=str(path),
        )
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except OSError:
            pass
    raise DaemonError.of(
        f"another agent listens on {path}",
        reason=error_pb2.REASON_NOT_ALLOWED,
        hint="one agent serves a node; end that one, or set CKPTD_RUN_DIR",
        object=str(path),
    )
