"""The Checkpointer: the only object a training script holds.

Owns: the life of everything below it. Does not own: any of the work, nor what an argument may be (`arguments`). Invariant:
after `close` nothing of it is left in this process but what the script was given.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, Unpack

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ckptd.protos import failpoints

from .arguments import checked_drop, checked_metrics, checked_step, checked_tags, checked_timeout
from .audit import Audit, Auditor
from .config import Config, Settings, resolve
from .copying import Copier
from .errors import CkptdError, InvalidRequest
from .handles import Ledger, SaveHandle
from .journal import Journal
from .link import Link, close_all
from .mapping import Names
from .mesh import topology
from .nested import Hook
from .reshard_hooks import ReshardHook
from .restored import Question, Restored
from .restoring import Restorer
from .saving import Saver
from .selecting import Choice, choice
from .things import Trackable
from .tracking import Tracking

log = logging.getLogger("ckptd.client")


class Checkpointer:
    """Keeps the state of a training job safe, and brings it back.

    Made on every rank that saves, after `init_process_group`; attaches to this node's agent, which is started if
    there is none. Several are independent of one another; all ranks must make those of one root in the same order.
    Use it from one thread at a time; handles may be waited for from any thread. In a forked child every call raises.

    Args:
        root: Root URL of the job, e.g. ``s3://bucket/runs/llama`` or ``file:///data/llama``; default: CKPTD_ROOT.
        job: The job's name; one root holds one job. Default: CKPTD_JOB.
        mesh: The job's device mesh, or axis sizes, slowest first; default: one axis over all ranks.
        process_group: The ranks that save together; default: all of the job.
        per_rank: Patterns (`fnmatch`) of tensor names that are each rank's own, e.g. ``model/*.running_mean``.
        on_failure: Called once for each save that failed, from the thread that notices it (not always the caller's);
            it must not wait for a save.
        config: All other settings; default: the environment's, see `Config`.
        **settings: Single fields of `Config`, which win over it.

    Raises:
        InvalidRequest: settings, root or job are wrong, another run is alive, or versions do not fit.
        Unavailable: no agent, or rank 0 did not come within the deadline.
        Fenced: a newer run has taken over.
    """

    def __init__(
        self,
        root: str | None = None,
        *,
        job: str | None = None,
        mesh: DeviceMesh | Mapping[str, int] | None = None,
        process_group: ProcessGroup | None = None,
        per_rank: Sequence[str] = (),
        on_failure: Callable[[SaveHandle, CkptdError], None] | None = None,
        config: Config | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        _read_failpoints()
        given = {name: value for name, value in (("root", root), ("job", job)) if value is not None}
        self._config = resolve(config, {**given, **settings})
        self._topology = topology(mesh, process_group)
        self._journal = Journal(self._config.client_event_log, job=self._config.job, rank=self._topology.rank)
        self._ledger = Ledger(on_failure)
        self._tracking = Tracking(per_rank)
        self._copier = Copier(self._config.copy_threads)
        self._link = Link(self._config, self._topology, self._ledger)
        self._busy = threading.Lock()
        self._auditor = Auditor(
            mode=self._config.audit,
            things=self._tracking.given,
            scope_of=self._tracking.scope_of,
            world=self._topology.world,
            rank=self._topology.rank,
        )
        self._saver = Saver(
            config=self._config,
            topology=self._topology,
            link=self._link,
            ledger=self._ledger,
            tracking=self._tracking,
            copier=self._copier,
            journal=self._journal,
            auditor=self._auditor,
        )
        self._restorer = Restorer(
            config=self._config,
            topology=self._topology,
            link=self._link,
            tracking=self._tracking,
            copier=self._copier,
            journal=self._journal,
        )
        try:
            self._link.open()
        except BaseException:
            self._journal.close()
            raise
        _open.add(self)

    @property
    def rank(self) -> int:
        """This rank, in the group that saves together."""
        return self._topology.rank

    @property
    def world(self) -> int:
        """Ranks that save together."""
        return self._topology.world

    @property
    def timeline(self) -> str:
        """The run's timeline; "" until its start record is written."""
        return self._link.timeline

    def track(self, **things: Trackable) -> None:
        """Save and restore these from now on, each under its name.

        Nothing is read now. Random number generators of Python, numpy, torch and CUDA are tracked by themselves, as
        "rng".

        Args:
            **things: Modules, lists of modules with disjoint names, optimizers, generators, objects with `state_dict()` and
                `load_state_dict()`, or `PerRank` of one of them.

        Raises:
            InvalidRequest: a name is taken, or a thing is of no kind that can be tracked.
        """
        for name, thing in things.items():
            self._tracking.add(name, thing)

    def on_load(self, name: str, hook: Callable[[object], object]) -> None:
        """Let `hook` change the stored value of the tracked `name` before it is loaded.

        It gets what `state_dict()` gave when it was saved, with its tensors, in memory of its own: nothing live is
        touched before it has returned. Of a module it gets the extra state, of an optimizer what is no state tensor.
        """
        loaded: Hook = hook
        self._tracking.on_load(name, loaded)

    def on_reshard(self, name: str, hook: ReshardHook) -> None:
        """Let `hook` make the value of the tracked `name` when the step was saved on another mesh.

        It gets the pieces of all ranks that saved, and this rank's coordinate, and returns what to load here. Without
        one, a value that was equal on all ranks is taken, and one that was not is an error. "rng" has a rule of its
        own: the generators are seeded from the stored states, the step, and this rank's coordinate.

        A tensor of a module or an optimizer that was each rank's own is asked for by its name, or by a pattern, e.g.
        ``"model/*.running_*"``; the pieces' values are tensors in host memory, and the hook returns one of the shape and
        dtype of what this rank holds. Without a hook such a tensor is an error.
        """
        self._tracking.on_reshard(name, hook)

    def audit(self, state: Mapping[str, Any] | None = None) -> Audit:
        """Look for what `save(step, state)` would miss. Nothing is changed or sent.

        The first `save` does the same by itself and warns of findings, or raises; see the setting `audit`. `state_dict()`
        of tracked objects may be called.
        """
        self._link.check()
        return self._auditor.audit(state)

    def save(
        self,
        step: int,
        state: MutableMapping[str, Any] | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        tags: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> SaveHandle:
        """Save everything tracked, and `state`, as `step`. Every rank must call it with the same step.

        Returns when this rank's state is copied: training may go on and change it. What is staged then survives the
        death of the trainers; what is durable (`handle.wait()`) survives the loss of every node.

        Args:
            step: 0 to 10**12 - 1, not used before in this run.
            state: Values the script keeps itself; a top-level value may also be a module, an optimizer, or an object
            with
                `state_dict()`.
            metrics: Numbers to find the step by later.
            tags: Texts to find the step by later; 1 MiB together at most.
            timeout: Seconds to wait for the other ranks to ask, at most begin_timeout_s.

        Returns:
            A handle. It has failed already where this snapshot was lost but training may go on; it is `skipped` where
            every slot was busy.

        Raises:
            InvalidRequest: the step, the arguments or the state are wrong, or ranks disagree.
            Aborted: this rank's own state could not be read; all ranks were told.
            Fenced: a newer run has taken over.
            CkptdError: of the last failure, when max_failed_saves saves in a row have failed.
        """
        number = checked_step(step)
        values, texts = checked_metrics(metrics or {}), checked_tags(tags or {})
        with self._alone("save"):
            self._ledger.report()
            self._ledger.check_failures(self._config.max_failed_saves)
            return self._saver.save(number, state, metrics=values, tags=texts, timeout_s=checked_timeout(timeout))

    def restore(
        self,
        *,
        step: int | None = None,
        required: bool = False,
        on_corrupt: Literal["fallback", "raise"] = "fallback",
        strict: bool = True,
        rollback: bool = False,
        only: str | Iterable[str] | None = None,
        names: Names | None = None,
        cast: bool = False,
        drop: Sequence[str] = (),
        timeout: float | None = None,
    ) -> Restored | None:
        """Restore everything tracked, in place. Every rank must call it with the same arguments.

        Tensors are filled on their devices, optimizer state is made where there is none yet, objects are loaded,
        random number generators come last. The mesh may be another than the one that saved: each rank then gets the
        boxes it holds now; see `on_reshard` for what was each rank's own. Nothing is touched before all bytes of all
        ranks were found and verified.

        Args:
            step: A step; default: the newest.
            required: Raise instead of returning None where there is no step at all.
            on_corrupt: Whether a bad newest step is left for the newest good one, with a warning. An explicitly asked
            step
                always raises.
            strict: Whether every tracked name must be stored, and every stored one tracked.
            rollback: Whether `step` may be older than the newest: history then drops what is newer. In the first restore of a
                run only.
            only: Names, beginnings of names or `fnmatch` patterns of what to restore, e.g. ``["model"]``; the rest is not
                touched and stands in `Restored.left_out`. Of modules single tensors, everything else whole.
            names: Stored names to names here, where they differ: old beginnings to new ones, e.g.
                ``{"model/module.": "model/"}``, or a function. Optimizer state follows its parameter.
            cast: Whether to convert between floating dtypes where they differ.
            drop: Tracked names (or "rng"), and names or patterns of tensors of modules, that stay as they are here, whatever
                is stored.
            timeout: Seconds; default: restore_timeout_s.

        Returns:
            What was restored, or None: there is nothing yet.

        Raises:
            SnapshotNotFound: there is no such step, or none at all.
            SnapshotCorrupt: its bytes are not what was saved.
            InvalidRequest: it does not fit what is tracked (one error with all differences), or ranks disagree.
            Unavailable: the store or an agent cannot be reached in time.
            Fenced: a newer run has taken over.
        """
        chosen = choice(only, names, cast=cast)
        return self._restore(None, step, required, on_corrupt, strict, rollback, chosen, drop, timeout)

    def restore_into(
        self,
        state: MutableMapping[str, Any],
        *,
        step: int | None = None,
        required: bool = False,
        on_corrupt: Literal["fallback", "raise"] = "fallback",
        strict: bool = True,
        rollback: bool = False,
        only: str | Iterable[str] | None = None,
        names: Names | None = None,
        cast: bool = False,
        drop: Sequence[str] = (),
        timeout: float | None = None,
    ) -> Restored | None:
        """Restore everything tracked, and what was saved as `state`; see `restore`.

        Tensors in `state` are filled in place, and must have the stored shape and dtype; everything else in it is replaced by
        what was stored.
        """
        chosen = choice(only, names, cast=cast)
        return self._restore(state, step, required, on_corrupt, strict, rollback, chosen, drop, timeout)

    def _restore(  # noqa: PLR0917 - private: both callers pass everything on
        self,
        state: MutableMapping[str, Any] | None,
        step: int | None,
        required: bool,
        on_corrupt: Literal["fallback", "raise"],
        strict: bool,
        rollback: bool,
        chosen: Choice,
        drop: Sequence[str],
        timeout: float | None,
    ) -> Restored | None:
        if on_corrupt not in ("fallback", "raise"):
            raise InvalidRequest(f"on_corrupt={on_corrupt!r}", hint='use "fallback" or "raise"')
        limit = checked_timeout(timeout)
        question = Question(
            step=None if step is None else checked_step(step),
            required=required,
            on_corrupt=on_corrupt,
            strict=strict,
            rollback=rollback,
            chosen=chosen,
            drop=checked_drop(drop),
            timeout_s=self._config.restore_timeout_s if limit is None else min(limit, self._config.restore_timeout_s),
        )
        with self._alone("restore"):
            self._ledger.report()
            return self._restorer.restore(question, state)

    def _alone(self, what: str) -> _Alone:
        self._link.check()
        return _Alone(self._busy, what)

    def close(self, timeout: float | None = None) -> None:
        """Wait for what is in flight and end the session. Idempotent.

        What is staged but not durable by then is finished by the agents; a warning says which steps these are.

        Args:
            timeout: Seconds; default: commit_timeout_s.
        """
        limit = checked_timeout(timeout)
        if self not in _open:
            return  # the call before has waited, and said what was not durable by then
        left = (
            []
            if self._link.is_parents
            else self._ledger.drain(self._config.commit_timeout_s if limit is None else limit)
        )
        for handle in left:
            log.warning("closed before step %d was durable; the agents go on with it", handle.step)
        self._end(detach=True)

    def _end(self, *, detach: bool) -> None:
        _open.discard(self)
        if self._link.is_parents:
            return
        with contextlib.ExitStack() as rest:  # of which all is done, whatever interrupts what is before it
            for end in (self._journal.close, self._copier.close, self._saver.close, self._ledger.report):
                rest.callback(end)
            self._link.close(detach=detach)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            # This rank has failed: the others should hear of that, not of an orderly end.
            self._end(detach=False)


class _Alone:
    """Refuses a second call while one runs: two saves at once have no order."""

    def __init__(self, lock: threading.Lock, what: str) -> None:
        self._lock, self._what = lock, what

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise InvalidRequest(
                f"{self._what}() was called while another thread saves or restores", hint="call it from one thread"
            )

    def __exit__(self, *exc: object) -> None:
        self._lock.release()


def _read_failpoints() -> None:
    try:
        failpoints.configure_from_environment(again=False)
    except failpoints.FailpointSyntaxError as wrong:
        raise InvalidRequest(str(wrong), hint="unset it outside of fault tests") from wrong


_open: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


def _abandon_all() -> None:
    """Stop all event threads at the interpreter's end, before gRPC goes away. Agents finish what is staged."""
    for checkpointer in list(_open):
        checkpointer._end(detach=False)  # noqa: SLF001 - same module
    close_all()


atexit.register(_abandon_all)
