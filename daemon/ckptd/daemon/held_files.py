"""What stands beside a job's slots for the agent after this one: which steps they hold, and how these are laid out.

Owns: names and bytes of these files, each whole or not there. Does not own: when one is needed (`held`), nor files of jobs
that nobody comes back to (`orphans`). Invariant: a step is described by the very plans that it was begun with, or by none. A
plan's file bears the digest of all that stands in it, and the step's file names it: rows and writers make the digest of the
plan, but ties and a rank's place may be others from one step to the next of the same plan.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TypeVar

import blake3
import tenacity
from google.protobuf.message import DecodeError

from ckptd.daemon.errors import DaemonError, FormatError
from ckptd.daemon.shared_files import is_full, no_space
from ckptd.daemon.snapshots import Snapshot
from ckptd.protos.snapshot_pb2 import HeldPlan, HeldSnapshot

M = TypeVar("M", HeldPlan, HeldSnapshot)
_FRESH = ".new"
"""Ends the name of a file that is being written."""


class HeldFiles:
    """The files of one job. Methods on the event loop, but for `write_plan` and `write_snapshot`, which may run in threads."""

    def __init__(self, folder: Path, job_digest: str) -> None:
        self._folder = folder
        self._job = job_digest[:16]
        self._plans: set[tuple[int, bytes]] = set()
        """Rank and digest of each plan that was needed when it was last asked."""

    def write_plan(self, held: HeldPlan) -> bytes:
        """Keep a rank's plan; return the digest that names it.

        Raises:
            NoSpaceError: shared memory is full.
        """
        digest = self._write_plan(held)
        # An older agent that comes back would describe by it what it did not begin.
        self._older_plan_path(held.rank, held.plan_digest).unlink(missing_ok=True)
        return digest

    def write_snapshot(self, about: HeldSnapshot) -> None:
        """Keep what a step is, and which plans its slots are laid out by: those must be there.

        Raises:
            NoSpaceError: shared memory is full.
        """
        _write(self._snapshot_path(about.timeline, about.step), about.SerializeToString())

    def read(self, key: tuple[str, int], ranks: Collection[int]) -> tuple[HeldSnapshot, dict[int, HeldPlan]]:
        """Return what was written of a step, with each rank's plan.

        Args:
            key: Timeline and step.
            ranks: Whose slots are staged.

        Raises:
            DaemonError: a file is not there or not readable, a rank had not staged, or the plan is none the step was begun with.
        """
        path = self._snapshot_path(*key)
        data, written_at = _read(path)
        about = _parsed(HeldSnapshot, data, path)
        if set(ranks) != set(about.ranks):
            missing = sorted(set(about.ranks) - set(ranks))
            raise FormatError.of(f"the node's part is torn: ranks {missing} had not staged", object=str(path))
        if not about.plans:
            return about, {rank: self._read_older_plan(rank, about, written_at) for rank in ranks}
        if len(about.plans) != len(about.ranks):
            raise FormatError.of(f"{path} names {len(about.plans)} plans of {len(about.ranks)} ranks", object=str(path))
        return about, {
            rank: self._read_plan(rank, digest) for rank, digest in zip(about.ranks, about.plans, strict=True)
        }

    def renew(self, snapshots: Iterable[Snapshot]) -> None:
        """Describe steps that an older agent left as this one would; where there is no room for it they stay as they are."""
        older = [one for one in snapshots if not one.about.plans]
        with contextlib.suppress(DaemonError, OSError):
            for snapshot in older:
                for plan in snapshot.plans.values():
                    plan.digest = self._write_plan(plan.held)
                about = HeldSnapshot()
                about.CopyFrom(snapshot.about)
                about.plans.extend(snapshot.plans[rank].digest for rank in about.ranks)
                self.write_snapshot(about)
                snapshot.about = about
            # Not before all are described anew: several steps may have one plan, and the agent may die here.
            for snapshot in older:
                for plan in snapshot.plans.values():
                    self._older_plan_path(plan.held.rank, plan.held.plan_digest).unlink(missing_ok=True)

    def forget_snapshot(self, key: tuple[str, int]) -> None:
        """Delete what was written of a step; idempotent."""
        self._snapshot_path(*key).unlink(missing_ok=True)

    def keep_plans(self, needed: Collection[tuple[int, bytes]]) -> None:
        """Delete what was needed when this was last called, but for these plans, by rank and digest."""
        for rank, digest in self._plans.difference(needed):
            self._plan_path(rank, digest).unlink(missing_ok=True)
        self._plans = set(needed)

    def keep_only(self, snapshots: Iterable[Snapshot]) -> int:
        """Delete every file of the job but for those of these steps, whoever wrote it; return how many."""
        kept = set()
        for snapshot in snapshots:
            kept.add(self._snapshot_path(*snapshot.key))
            for rank, plan in snapshot.plans.items():
                kept.add(self._plan_path(rank, plan.digest))
                if not snapshot.about.plans:
                    kept.add(self._older_plan_path(rank, snapshot.about.plan_digest))
        useless = [path for path in self._folder.glob(f"{self._job}.*.pb") if path not in kept]
        for path in useless:
            path.unlink(missing_ok=True)
        return len(useless)

    def free_cut_off(self) -> None:
        """Delete what an agent was killed while writing; for before this one writes anything.

        Another agent that lives in this folder may lose what it writes just now: it writes it again (`_write`).
        """
        for path in self._folder.glob(f"{self._job}.*{_FRESH}"):
            path.unlink(missing_ok=True)

    # ------------------------------------------------------------ single files

    def _write_plan(self, held: HeldPlan) -> bytes:
        data = held.SerializeToString()
        digest = blake3.blake3(data).digest()
        _write(self._plan_path(held.rank, digest), data)
        return digest

    def _read_plan(self, rank: int, digest: bytes) -> HeldPlan:
        path = self._plan_path(rank, digest)
        data, _ = _read(path)
        if blake3.blake3(data).digest() != digest:
            raise FormatError.of(f"{path} is not the plan that the step was begun with", object=str(path))
        return _parsed(HeldPlan, data, path)

    def _read_older_plan(self, rank: int, about: HeldSnapshot, begun_at: int) -> HeldPlan:
        """Read a plan of an agent that named it by the plan's digest, and wrote it anew when ties or place were others."""
        path = self._older_plan_path(rank, about.plan_digest)
        data, written_at = _read(path)
        # It wrote the plan before the step's file, and not again but for another step that is described otherwise.
        if written_at > begun_at:
            raise FormatError.of(
                f"{path} was written anew after step {about.step} was begun: its ties may be others", object=str(path)
            )
        return _parsed(HeldPlan, data, path)

    def _plan_path(self, rank: int, digest: bytes) -> Path:
        return self._folder / f"{self._job}.plan.r{rank}.{digest.hex()[:32]}.pb"

    def _older_plan_path(self, rank: int, plan_digest: bytes) -> Path:
        return self._folder / f"{self._job}.plan.{plan_digest.hex()[:32]}.r{rank}.pb"

    def _snapshot_path(self, timeline: str, step: int) -> Path:
        return self._folder / f"{self._job}.snapshot.{timeline}.{step:012d}.pb"


def _read(path: Path) -> tuple[bytes, int]:
    """Return a file's bytes, and when they were written, in nanoseconds of the system's clock."""
    try:
        with path.open("rb") as file:
            return file.read(), os.fstat(file.fileno()).st_mtime_ns
    except OSError as error:
        raise FormatError.of(f"{path} cannot be read: {error.strerror}", object=str(path)) from error


def _parsed(kind: type[M], data: bytes, path: Path) -> M:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise FormatError.of(f"{path} cannot be read: {error}", object=str(path)) from error


# Each agent that starts in this folder may sweep what we write just now, once.
@tenacity.retry(
    retry=tenacity.retry_if_exception_type(FileNotFoundError), stop=tenacity.stop_after_attempt(3), reraise=True
)
def _write(path: Path, data: bytes) -> None:
    """Write a small file whole: a reader sees the old one or the new one."""
    fresh = path.with_suffix(_FRESH)
    try:
        fresh.touch(mode=0o600)
        fresh.write_bytes(data)
        fresh.replace(path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        if is_full(error):
            raise no_space(path.parent, len(data), error) from error
        raise
