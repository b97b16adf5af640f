"""Harm to what is a node's own: its processes (beyond killing), its disks, its clock.

Owns: how these deeds are done, and how they are taken back. Does not own: when (`injector`), nor the means (`cluster.disks`,
`cluster.planted`, `pacer`). Invariant: as in `process`: what is returned was really done.
"""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from ckptd.chaos.cluster.cluster import Cluster
from ckptd.chaos.cluster.disks import DiskError
from ckptd.chaos.cluster.node import Node
from ckptd.chaos.cluster.planted import shift_of
from ckptd.chaos.local_faults import DiskFault, SlowFault
from ckptd.chaos.nemesis.harm import Harm, NemesisError, agent_of, send
from ckptd.chaos.nemesis.pacer import Pacer
from ckptd.chaos.planted.sitecustomize import RAISE_SIGNAL
from ckptd.chaos.schedule import PlannedFault

_SIGNALS = {"segfault": signal.SIGSEGV, "terminate": signal.SIGTERM, "raise": RAISE_SIGNAL, "hang": signal.SIGSTOP}
_NO_CORE = 1
"""Bound of a core file, bytes: too small for a file, and what the kernel takes as "none" where a program takes the core."""


def strike_local(fault: PlannedFault, cluster: Cluster, *, coordinator: Node) -> Harm:
    """Do what the fault says, at once; see `process.strike`.

    Raises:
        NemesisError: The target does not live, or it cannot be done to it.
    """
    if fault.do == "reboot":
        return _reboot(_nodes(fault, cluster, coordinator))
    if fault.do == "clock":
        return _shift_clock(fault, cluster, coordinator)
    if isinstance(fault.local, DiskFault):
        return _harm_disk(fault, fault.local, cluster, coordinator)
    pids = _pids(fault, cluster, coordinator)
    if isinstance(fault.local, SlowFault):
        pacer = Pacer(pids, fault.local.percent)
        pacer.start()
        return Harm(pids=(), undo=pacer.stop, what=fault.target, undo_after_s=fault.local.for_s)
    if fault.do == "segfault":
        _forbid_cores(pids)
    if fault.do == "raise":
        _require_handler(pids[0])
    of_rank = fault.kind == "rank"
    return Harm(pids=send(pids, _SIGNALS[fault.do]), ends_launch=of_rank, is_hung=fault.do == "hang")


def _pids(fault: PlannedFault, cluster: Cluster, coordinator: Node) -> list[int]:
    if fault.kind != "rank" or fault.which is None:
        return agent_of(coordinator if fault.kind == "coordinator" else cluster.nodes[fault.which or 0])
    pid = cluster.rank_pids().get(fault.which)
    if pid is None:
        raise NemesisError(f"rank {fault.which} does not live")
    return [pid]


def _nodes(fault: PlannedFault, cluster: Cluster, coordinator: Node) -> list[Node]:
    if fault.kind in ("all", "store"):
        return list(cluster.nodes)
    if fault.kind == "coordinator":
        return [coordinator]
    return [cluster.nodes[(fault.which or 0) // cluster.nproc if fault.kind == "rank" else fault.which or 0]]


def _forbid_cores(pids: Sequence[int]) -> None:
    for pid in pids:
        try:
            resource.prlimit(pid, resource.RLIMIT_CORE, (_NO_CORE, _NO_CORE))
        except OSError as error:
            raise NemesisError(f"process {pid} might leave a core file: {error}") from None


def _require_handler(pid: int) -> None:
    """See that the process would raise: without a handler the signal would kill it, which is another fault."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        raise NemesisError(f"process {pid} does not live") from None
    caught = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:"))
    if not caught >> (RAISE_SIGNAL - 1) & 1:
        raise NemesisError(
            f"process {pid} would not raise: its Python was started without sitecustomize (-I, -S, -E), or took the signal over"
        )


def _reboot(nodes: Sequence[Node]) -> Harm:
    # All get the signal before anyone is waited for: at once means at once.
    pids = [pid for node in nodes for pid in node.signal_all(signal.SIGKILL)]
    for node in nodes:
        node.reboot()
    return Harm(pids=tuple(pids), rebooted=tuple(nodes), ends_launch=True)


def _shift_clock(fault: PlannedFault, cluster: Cluster, coordinator: Node) -> Harm:
    planted = cluster.planted
    if planted is None:
        raise NemesisError("nothing was planted into the processes of this run")
    who = str(fault.which) if fault.kind == "rank" else "agent" if fault.kind == "agent" else None
    names = [node.place.name for node in _nodes(fault, cluster, coordinator)]
    for name in names:
        planted.set_clock(name, who, shift_of(fault))

    def undo() -> None:
        for name in names:
            planted.set_clock(name, who, 0.0)

    return Harm(pids=(), undo=undo, what=fault.target, undo_after_s=_seconds(fault))


def _harm_disk(fault: PlannedFault, disk: DiskFault, cluster: Cluster, coordinator: Node) -> Harm:
    nodes = _nodes(fault, cluster, coordinator)
    if disk.disk == "store":
        if cluster.store_folder is None:
            raise NemesisError("the store has no folder on this machine")
        places = {node.place.name: cluster.store_folder for node in nodes}
    else:
        places = {node.place.name: node.place.disks()[disk.disk] for node in nodes}
    with ExitStack() as undone:
        try:
            if disk.is_mounted:
                for folder in dict.fromkeys(places.values()):
                    undone.callback(_harm_mount(disk, folder, cluster))
            else:
                for name, folder in places.items():
                    undone.callback(_plant_refusal(disk, name, folder, cluster))
        except DiskError as error:
            raise NemesisError(str(error)) from None
        return Harm(
            pids=(),
            undo=undone.pop_all().close,
            what=fault.target,
            undo_after_s=_seconds(fault),
            blocks_start=disk.disk in ("store", "shm"),
        )


def _harm_mount(disk: DiskFault, folder: Path, cluster: Cluster) -> Callable[[], None]:
    disks = cluster.disks
    if disks is None:
        raise NemesisError("the disks of this run are no file systems of their own")
    if disk.kind == "full":
        disks.fill(folder, disk.left_kib << 10)
    else:
        disks.forbid(folder)
    return lambda: disks.free(folder)


def _plant_refusal(disk: DiskFault, name: str, folder: Path, cluster: Cluster) -> Callable[[], None]:
    planted = cluster.planted
    if planted is None:
        raise NemesisError("nothing was planted into the processes of this run")
    planted.refuse(name, disk, folder)
    return lambda: planted.accept(name, disk, folder)


def _seconds(fault: PlannedFault) -> float | None:
    return getattr(fault.local, "for_s", None)
