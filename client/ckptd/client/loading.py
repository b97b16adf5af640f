"""A stored step in one process and without the job: for evaluation, export and a look inside.

Owns: checking arguments. Does not own: reading (`opened_step`). Invariant: nothing is claimed or written anywhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from .config import Config, resolve
from .errors import InvalidRequest
from .loaded_step import WINDOW_BYTES, LoadedStep, Names
from .opened_step import OpenStep


@contextlib.contextmanager
def open_step(
    root: str,
    step: int | None = None,
    *,
    job: str | None = None,
    window_bytes: int = WINDOW_BYTES,
    config: Config | None = None,
) -> Iterator[OpenStep]:
    """Open a stored step for reading, in this process alone: no launcher, no process group, no job.

    An agent is started for it, which claims and writes nothing and ends with the block. The job may be running. What
    the step holds is known at once; nothing of it is read before it is asked for.

    Args:
        root: Root URL of the job.
        step: A step; default: the newest.
        job: The job's name, to be sure; default: whatever job the root holds.
        window_bytes: What is read at once, at least 1 MiB.
        config: Settings, such as `store_driver`; default: the environment's.

    Raises:
        SnapshotNotFound: there is no such step (the message lists those there are), or none at all.
        SnapshotCorrupt: the step's records are not what was written. No other step is taken instead.
        InvalidRequest: the arguments are wrong, or the store refuses the credentials.
        Unavailable: the store or the agent cannot be reached.
    """
    if isinstance(step, bool) or not isinstance(step, int | None):
        raise InvalidRequest(f"step {step!r} is no whole number", key="step")
    if window_bytes < 1 << 20:
        raise InvalidRequest(f"window_bytes={window_bytes!r} is less than 1 MiB", key="window_bytes")
    settings = resolve(config, {"root": root, "job": job or ""}, any_job=not job)
    opened = OpenStep(settings, step=step, window_bytes=window_bytes)
    try:
        yield opened
    finally:
        opened.close()


def load(
    root: str,
    step: int | None = None,
    names: Names | None = None,
    *,
    objects: bool = False,
    job: str | None = None,
    window_bytes: int = WINDOW_BYTES,
    config: Config | None = None,
) -> LoadedStep:
    """Return a stored step as plain tensors on the CPU: whole ones, whatever mesh saved them.

    Runs in one process, beside a running job too, with credentials that may only read. Memory: the result, and at most a
    window. Tied names come back sharing memory.

    Args:
        root: Root URL of the job.
        step: A step; default: the newest.
        names: What to load, by global name: names, each with all below it ("model/layers.0"), or `fnmatch` patterns
            ("model/*.bias"). Each must choose something. Default: everything global.
        objects: Whether to load Python objects, and tensors that were each rank's own, as well: `LoadedStep.objects` and
            `LoadedStep.own`, by coordinate. `names` chooses among them too.
        job: The job's name, to be sure; default: whatever job the root holds.
        window_bytes: What is read at once.
        config: Settings; default: the environment's.

    Raises:
        CkptdError: see `open_step`; SnapshotCorrupt also where bytes of tensors are not what was saved.
        InvalidRequest: `names` chooses nothing.
    """
    with open_step(root, step, job=job, window_bytes=window_bytes, config=config) as opened:
        return opened.read(names, objects=objects)
