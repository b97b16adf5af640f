"""What a rank asks of its agent at the start, checked before anything is done.

Pure. Owns: which job names, drivers, runs and ranks make sense by themselves. Does not own: whether the root can be used (the
store says), nor whether ranks fit each other (the coordinator). Invariant: what passes contradicts nothing in the same
message, and the run's secrets are such that nobody without them is let in.
"""

from __future__ import annotations

import math
from operator import ge

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from ckptd.daemon.comparisons import parse_policy
from ckptd.daemon.errors import DaemonError
from ckptd.daemon.keys import Timeline
from ckptd.protos import error_pb2
from ckptd.protos.agent_pb2 import AttachRequest, LeadRequest, RunCredentials
from ckptd.storage_backends.urls import Driver

MAX_JOB_NAME = 128
MIN_TOKEN_BYTES = 16


def checked_driver(driver: str) -> Driver:
    """Return a store driver's name.

    Raises:
        DaemonError: INVALID_ARGUMENT, it is none.
    """
    names: dict[str, Driver] = {"auto": "auto", "obstore": "obstore", "fsspec": "fsspec"}
    if driver in names:
        return names[driver]
    raise DaemonError.of(
        f"store driver {driver!r} is not one of auto, obstore, fsspec",
        reason=error_pb2.REASON_INVALID_ARGUMENT,
        phase="register",
    )


def check_job_name(job: str) -> None:
    """Refuse a job name that cannot be shown or compared safely.

    Raises:
        DaemonError: INVALID_ARGUMENT with the allowed set.
    """
    if not job or len(job) > MAX_JOB_NAME or job in {".", ".."} or not job.isprintable() or job != job.strip():
        raise DaemonError.of(
            f"job name {job!r} is not usable",
            reason=error_pb2.REASON_INVALID_ARGUMENT,
            hint=f"1 to {MAX_JOB_NAME} printable characters, no blanks at either end, not '.' or '..'",
            phase="register",
        )


def check_lead(request: LeadRequest) -> None:
    """Refuse to lead a run that contradicts itself, or that anybody could join.

    Raises:
        DaemonError: INVALID_ARGUMENT.
    """
    wrong = _wrong_run(request) or _wrong_secrets(request.credentials)
    if not wrong:
        try:
            load_pem_private_key(request.credentials.private_key, None)
        except (ValueError, TypeError) as unreadable:
            wrong = f"the run's private_key cannot be read: {unreadable}"
    if wrong:
        raise DaemonError.of(wrong, reason=error_pb2.REASON_INVALID_ARGUMENT, phase="register")


def check_attach(request: AttachRequest) -> None:
    """Refuse an attach that contradicts itself.

    Raises:
        DaemonError: INVALID_ARGUMENT.
    """
    wrong = _wrong_run(request) or _wrong_secrets(request.credentials)
    if not request.endpoint:
        wrong = "endpoint must be set"
    elif request.rank >= request.world:
        wrong = f"rank {request.rank} is not in a world of {request.world}"
    elif len(request.coordinate) != len(request.mesh.sizes) or any(map(ge, request.coordinate, request.mesh.sizes)):
        wrong = wrong or f"coordinate {list(request.coordinate)} does not fit the mesh {list(request.mesh.sizes)}"
    try:
        for ref in request.in_flight:
            Timeline.parse(ref.timeline)
    except ValueError as error:
        wrong = wrong or f"in_flight: {error}"
    if wrong:
        raise DaemonError.of(wrong, reason=error_pb2.REASON_INVALID_ARGUMENT, rank=request.rank, phase="register")


def _wrong_run(request: LeadRequest | AttachRequest) -> str:
    axes, sizes = list(request.mesh.axes), list(request.mesh.sizes)
    if not request.run_id:
        return "run_id must be set"
    if request.world < 1:
        return f"a world of {request.world} ranks is no run"
    if len(axes) != len(sizes):
        return f"mesh axes {axes} and sizes {sizes} do not fit together"
    if sizes and math.prod(sizes) != request.world:
        return f"mesh {dict(zip(axes, sizes, strict=True))} does not have {request.world} ranks"
    try:
        parse_policy(request.options.verify_replicas)
    except ValueError as wrong:
        return str(wrong)
    return ""


def _wrong_secrets(credentials: RunCredentials) -> str:
    # An empty token would be the token of everybody who shows none.
    if len(credentials.token) < MIN_TOKEN_BYTES:
        return f"the run's token has {len(credentials.token)} bytes, fewer than {MIN_TOKEN_BYTES}"
    try:
        certificate = x509.load_pem_x509_certificate(credentials.certificate)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound) as unreadable:
        return f"the run's certificate cannot be read: {unreadable}"
    return "" if names.get_values_for_type(x509.DNSName) else "the run's certificate names no host"
