"""Any failure as an `Error` message, so that it crosses process boundaries with its reason.

Owns: which reason an error of the store has. Does not own: errors of the daemon itself (`errors`), of gRPC (`rpc`).
"""

from __future__ import annotations

from ckptd.daemon import rpc
from ckptd.daemon.errors import make_error
from ckptd.protos import error_pb2
from ckptd.protos.error_pb2 import Error
from ckptd.storage_backends.errors import StorageError


def wire_error(failure: BaseException, *, phase: str, step: int | None = None, node: str = "") -> Error:
    """Return any failure as an `Error`, a store's with its key and hint."""
    if isinstance(failure, StorageError):
        return make_error(
            storage_reason(failure),
            str(failure).removesuffix(f" ({failure.hint})"),
            hint=failure.hint or "",
            step=step,
            node=node,
            object=failure.key or "",
            phase=phase,
        )
    error = Error()
    error.CopyFrom(rpc.error_of(failure))
    error.phase = error.phase or phase
    error.node = error.node or node
    if step is not None and not error.HasField("step"):
        error.step = step
    return error


def storage_reason(failure: StorageError) -> error_pb2.Reason.ValueType:
    """Return the reason of a store's error."""
    by_name = {
        "NotFound": error_pb2.REASON_CORRUPT,
        "InvalidUrl": error_pb2.REASON_INVALID_ROOT,
        "BucketMissing": error_pb2.REASON_INVALID_ROOT,
        "PermissionDenied": error_pb2.REASON_PERMISSION_DENIED,
        "NoSpace": error_pb2.REASON_NO_SPACE,
        "NotDurable": error_pb2.REASON_OUTCOME_UNKNOWN,
        "OutcomeUnknown": error_pb2.REASON_OUTCOME_UNKNOWN,
        "Throttled": error_pb2.REASON_UNAVAILABLE,
        "Unavailable": error_pb2.REASON_UNAVAILABLE,
    }
    return by_name.get(type(failure).__name__, error_pb2.REASON_STORE_FAILED)
