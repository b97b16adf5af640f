"""`ckptd retain`: apply a rule of retention to a job that is not running."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptd.daemon.catalog import read_catalog
from ckptd.daemon.cli.offline_start import DryRun, GiveUp, print_nothing, print_start, print_would_drop, start_offline
from ckptd.daemon.cli.root import Driver, Json, Root, opened
from ckptd.daemon.history import order, pinned_steps
from ckptd.daemon.keys import PINS_PREFIX
from ckptd.daemon.retention import kept
from ckptd.protos.snapshot_pb2 import Retention


def retain(
    root: Root,
    *,
    keep_last: Annotated[int, typer.Option("--keep-last", min=1, help="The newest N steps stay.")],
    keep_every: Annotated[int, typer.Option("--keep-every", min=0, help="Steps divisible by N stay too.")] = 0,
    dry_run: DryRun = False,
    give_up: GiveUp = False,
    json: Json = False,
    driver: Driver = "auto",
) -> None:
    """Keep the newest steps of a job that is not running, drop the others: writes a start record; `ckptd sweep` deletes.

    The rule counts once; the next run has its own. Pinned steps stay. Claims a timeline: a run that is alive and
    cannot be seen from here is fenced. Exits with 6 when the job is visibly alive.
    """
    retention = Retention(keep_last=keep_last, keep_every=keep_every)
    with opened(root, driver) as store:
        catalog = read_catalog(store)
        listed = catalog.newest.listed if catalog.newest is not None else []
        pins = pinned_steps(info.key for info in store.list(PINS_PREFIX))
        staying = {order(ref) for ref in kept(listed, catalog.latest, retention, pins)}
        going = [step for step in map(order, listed) if step not in staying]
        if not going:
            print_nothing(root, json=json)
            return
        if dry_run:
            print_would_drop(root, going, json=json)
            return
        done = start_offline(store, retention=retention, give_up=give_up)
    print_start(root, done, json=json)
