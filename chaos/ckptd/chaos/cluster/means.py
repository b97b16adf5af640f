"""What a run must be prepared with so that the faults of `local_faults` can be done to it.

Owns: giving a cluster the means, for the time of a run, and saying where they are not to be had. Does not own the means
(`planted`, `disks`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ckptd.chaos.cluster.cluster import Cluster
from ckptd.chaos.cluster.disks import Disks, missing, mounted_faults, private_mounts
from ckptd.chaos.cluster.planted import Planted, parts_wanted
from ckptd.chaos.local_faults import DiskFault
from ckptd.chaos.schedule import PlannedFault, ScheduleError


def require_means(faults: Sequence[PlannedFault], *, store: str) -> str:
    """Return why these faults cannot be done on this machine; "" where they can, or where there are none.

    Raises:
        ScheduleError: They cannot be done to this store anywhere.
    """
    disks = [fault.local for fault in faults if isinstance(fault.local, DiskFault)]
    if store != "local" and any(disk.disk == "store" for disk in disks):
        raise ScheduleError(f"a store of kind {store} has no disk of ours that could be full; say --store local")
    if not mounted_faults(faults):
        return ""
    why = missing()
    return why and (
        f"not run: a disk that is full or read-only needs a mount of its own, which is not allowed here ({why}); "
        "run it as root, in a container with --cap-add SYS_ADMIN"
    )


@contextmanager
def local_means(cluster: Cluster, faults: Sequence[PlannedFault], root: str) -> Iterator[None]:
    """Give a cluster that has not been started what its faults need, for the block; evidence is kept.

    Where mounts are not allowed it gets none, and what needs one is not done: `require_means` says so before.

    Raises:
        DiskError: Mounting failed.
    """
    url = urlsplit(root)
    cluster.store_folder = Path(unquote(url.path)) if url.scheme == "file" else None
    if parts := parts_wanted(faults):
        cluster.planted = Planted(cluster.folder / "planted", parts)
    mounted = mounted_faults(faults)
    if not mounted or missing():
        yield
        return
    with private_mounts(), Disks(mounted) as disks:
        if cluster.store_folder is not None:
            disks.put_under({"store": cluster.store_folder})
        cluster.disks = disks
        yield
