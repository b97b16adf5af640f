"""How rank 0 tells the others where the coordinator is and what to trust: through the job's own store.

Owns: keys in the store and waiting for them. Does not own: what is told. No collective: the training's own are never
met. Invariant: two Checkpointers never read one another's keys, and a wait never holds the store's lock, so that it
delays no other user of the store.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from typing import ClassVar

from torch.distributed.distributed_c10d import Store

from ckptd.protos import error_pb2
from ckptd.protos.agent_pb2 import AttachRequest
from ckptd.protos.error_pb2 import Error

from .errors import CkptdError, Unavailable, from_wire
from .mesh import Topology

_POLL_S = 0.05


class StoreExchange:
    """The keys of one Checkpointer. Every rank must make its Checkpointers of one root in the same order."""

    _made: ClassVar[Counter[str]] = Counter()
    _made_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, topology: Topology, *, root: str, job: str) -> None:
        self._store: Store | None = topology.store
        group = hashlib.sha256(repr((root, job, topology.members)).encode()).hexdigest()[:16]
        with self._made_lock:
            number = self._made[group]
            self._made[group] += 1
        self._prefix = f"ckptd/{group}/{number}"

    def publish(self, invitation: AttachRequest, *, generation: int) -> None:
        """Tell the others; rank 0 only. `generation` counts up when the coordinator came back at another endpoint."""
        self._set(generation, b"+" + invitation.SerializeToString())

    def refuse(self, error: CkptdError, *, generation: int) -> None:
        """Tell the others that rank 0 cannot lead; rank 0 only."""
        self._set(generation, b"-" + error.to_wire().SerializeToString())

    def _set(self, generation: int, data: bytes) -> None:
        if self._store is not None:
            self._store.set(f"{self._prefix}/{generation}", data)  # type: ignore[arg-type] # its stub forgets bytes

    def newest(self, *, after: int) -> tuple[int, AttachRequest] | None:
        """Return the newest invitation that is newer than generation `after`, if there is one now.

        Raises:
            CkptdError: what rank 0 refused with.
        """
        found = None
        while self._store is not None and self._store.check([f"{self._prefix}/{after + 1}"]):
            after += 1
            found = after, self._read(after)
        return found

    def _read(self, generation: int) -> AttachRequest:
        assert self._store is not None
        data = bytes(self._store.get(f"{self._prefix}/{generation}"))
        if data[:1] == b"-":
            raise from_wire(Error.FromString(data[1:]))
        return AttachRequest.FromString(data[1:])

    def wait(self, timeout_s: float) -> tuple[int, AttachRequest]:
        """Return the first invitation.

        Raises:
            CkptdError: what rank 0 refused with.
            Unavailable: rank 0 said nothing within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            found = self.newest(after=-1)
            if found is not None:
                return found
            if time.monotonic() >= deadline:
                raise Unavailable(
                    f"rank 0 told no coordinator within {timeout_s:g} s",
                    reason=error_pb2.REASON_RANKS_MISSING,
                    hint="every rank must make its Checkpointer of this root, in the same order",
                    rank=0,
                    phase="register",
                )
            time.sleep(_POLL_S)
