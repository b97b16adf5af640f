"""Opening a job's root: whether this agent serves it, the store's retries, and the try at start.

Owns: how long a store may be away, when a run starts and afterwards. Does not own: which jobs are open (`agent`), the retries
themselves and the probe (storage room). Time decides, never a count of tries: a store that is back within it is enough,
however often it was asked in vain.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection

from ckptd.daemon.errors import DaemonError
from ckptd.daemon.request_checks import checked_driver
from ckptd.daemon.wire_errors import wire_error
from ckptd.protos import error_pb2
from ckptd.protos.failpoints import failpoint
from ckptd.storage_backends.base import ObjectStore
from ckptd.storage_backends.errors import StorageError
from ckptd.storage_backends.probe import probe
from ckptd.storage_backends.retrying import RetryPolicy
from ckptd.storage_backends.urls import open_store, redacted

PROBE_S = 20.0
"""A store that is away when a run starts should be said so soon: sooner than a rank gives up on its agent, which is 30 s."""
_LONGEST_PAUSE = dt.timedelta(seconds=5)
"""Short beside the default of `store_deadline_s`: what an outage leaves of it is enough for a dozen errors in a row."""
_LONGEST_PROBE_PAUSE = dt.timedelta(seconds=1)


def job_retry(deadline_s: float) -> RetryPolicy:
    """Return how a job's store is tried again: each operation for so many seconds."""
    return RetryPolicy(attempts=None, deadline=dt.timedelta(seconds=deadline_s), longest_pause=_LONGEST_PAUSE)


def probe_retry(deadline_s: float) -> RetryPolicy:
    """Return how the store is tried again while it is probed: not longer than it may be away later, and than PROBE_S."""
    deadline = dt.timedelta(seconds=min(deadline_s, PROBE_S))
    return RetryPolicy(attempts=None, deadline=deadline, longest_pause=_LONGEST_PROBE_PAUSE)


def open_root(root: str, driver: str, *, read_only: bool, deadline_s: float, node: str) -> ObjectStore:
    """Open a root's store, and probe it unless it is for reading only. Blocks.

    Args:
        root: Its URL.
        driver: A driver's name, or auto.
        read_only: Whether nothing will be written: the probe would.
        deadline_s: Seconds for which each operation is tried again.
        node: Said in errors.

    Raises:
        DaemonError: the root cannot be used.
    """
    name = checked_driver(driver)
    failpoint("agent.before_open_root")
    try:
        store = open_store(root, driver=name, retry=job_retry(deadline_s))
        if not read_only:
            with open_store(root, driver=name, retry=probe_retry(deadline_s)) as probed:
                probe(probed)
            store.capabilities = probed.capabilities
    except (StorageError, OSError) as failure:
        error = wire_error(failure, phase="register", node=node)
        if error.reason in {error_pb2.REASON_STORE_FAILED, error_pb2.REASON_INTERNAL}:
            error.reason = error_pb2.REASON_INVALID_ROOT
        error.hint = error.hint or "the root must be a folder or prefix that this agent may write to"
        error.object = redacted(root)
        raise DaemonError(error) from failure
    return store


def check_root(root: str, allowed: Collection[str]) -> None:
    """Refuse a root that would not last, or that this agent does not serve.

    Args:
        root: Its URL.
        allowed: Roots that are served with all below them; none: any.

    Raises:
        DaemonError: INVALID_ROOT or NOT_ALLOWED.
    """
    if root.startswith("memory:"):
        raise DaemonError.of(
            f"root {root} ends with the agent's process",
            reason=error_pb2.REASON_INVALID_ROOT,
            hint="a step in it would be called durable and is not: use file:///abs/path or s3://bucket/prefix",
            object=root,
            phase="register",
        )
    if allowed and not any(root == one or root.startswith(one.rstrip("/") + "/") for one in allowed):
        raise DaemonError.of(
            f"root {redacted(root)} is not among the roots this agent serves: {', '.join(allowed)}",
            reason=error_pb2.REASON_NOT_ALLOWED,
            hint="add it to `roots` in the agent's configuration",
            object=redacted(root),
            phase="register",
        )
