"""The coordinator: a role that one agent process plays for one timeline of a job.

Pure: `Coordinator.apply(event, now)` returns effects, `ckptd.daemon.runner` executes them. Rooms: `starting` (resolve, start
record), `claiming`, `adopting`, `saving` (begin to decision), `restoring`, `core` (dispatch), `state`, `effects`.
"""

from ckptd.daemon.coordinator.core import Coordinator

__all__ = ["Coordinator"]
