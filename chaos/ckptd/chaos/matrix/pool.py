"""Runs cells in several workers at once, and keeps each result as it comes.

Owns: worker processes, who has which cell, the store that they share. Does not own: what a worker does (`worker`), nor the
file of results (`results`), which only this process writes. Invariants: a result that came is kept, whatever becomes of
its worker; a cell whose worker died is unknown; every worker ends with this process.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Self

from ckptd.chaos.cluster.store import S3Store, open_store
from ckptd.chaos.matrix.cells import Cell
from ckptd.chaos.matrix.results import CellResult, Results, result_of
from ckptd.chaos.verdict import Verdict
from ckptd.chaos.watch import read_tail

_COMMAND = (sys.executable, "-m", "ckptd.chaos.matrix.worker")
_END_GRACE = timedelta(seconds=60)
_MOST_DEATHS = 10


def default_workers() -> int:
    """Return one more than there are processors: a cell waits for a part of its time, a second where it pauses a process."""
    return len(os.sched_getaffinity(0)) + 1


class _Worker:
    """One worker process and the cell it has. For one thread."""

    def __init__(
        self, command: Iterable[str], number: int, out: Path, results: Results, shared: Mapping[str, object]
    ) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.log = out / "worker.log"
        self.cell: str | None = None
        self._rest = b""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, str(os.getpid()), str(number), str(out), str(results.folder.parent), results.code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                # A terminal's Ctrl-C is for the parent, which ends its workers in order.
                start_new_session=True,
            )
        self._say(json.dumps(shared))

    def _say(self, line: str) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # its end is seen where its answers are read
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()

    @property
    def answers(self) -> int:
        """File descriptor of its answers."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def give(self, cell: str) -> None:
        """Have it run a cell."""
        self.cell = cell
        self._say(cell)

    def take(self) -> tuple[list[CellResult], bool]:
        """Return the results that came, and whether it still lives."""
        found = os.read(self.answers, 1 << 20)
        *lines, self._rest = (self._rest + found).split(b"\n")
        return [result_of(json.loads(line)) for line in lines], bool(found)

    def end(self) -> None:
        """No more cells; one that runs is broken off."""
        self._hang_up()
        if self.cell is not None:
            self.process.send_signal(signal.SIGTERM)

    def await_end(self) -> None:
        """Wait until it has ended."""
        self._hang_up()
        try:
            self.process.wait(_END_GRACE.total_seconds())
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _hang_up(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()


class Pool:
    """Workers for the cells of the small job. A context manager; for one thread.

    Args:
        out: Folder for evidence, a folder in it for each worker.
        results: Gets each result.
        workers: How many, at least 1.
        command: Starts one worker; replaced in tests.
    """

    def __init__(self, out: Path, results: Results, workers: int, *, command: Iterable[str] = _COMMAND) -> None:
        self._out, self._results, self._count = out, results, workers
        self._command = tuple(command)
        self._stack = ExitStack()
        self._shared: dict[str, object] = {}
        self._workers: list[_Worker] = []
        self._started = self._deaths = 0

    def run(self, cells: Iterable[Cell], *, tell: Callable[[CellResult], None]) -> None:
        """Run cells in their order, several at a time; keep their results, and tell each as it comes.

        Raises:
            RuntimeError: The shared store does not start, or workers die again and again.
            TimeoutError: The shared store does not start.
        """
        due = deque(cells)
        if any(cell.store == "s3" for cell in due) and "s3" not in self._shared:
            store = self._stack.enter_context(open_store("s3", self._out / "store-s3"))
            assert isinstance(store, S3Store)
            self._shared["s3"] = {"bucket": store.bucket, "variables": dict(store.variables)}
        with selectors.DefaultSelector() as selector:
            for _ in range(min(self._count, len(due))):
                self._feed(self._start(selector), due)
            while any(worker.cell is not None for worker in self._workers):
                for key, _ in selector.select():
                    worker: _Worker = key.data
                    found, lives = worker.take()
                    for result in found:
                        worker.cell = None
                        self._keep(result, tell)
                    if not lives:
                        selector.unregister(worker.answers)
                        worker = self._buried(worker, selector, tell)
                    if worker.cell is None:
                        self._feed(worker, due)

    def _start(self, selector: selectors.BaseSelector) -> _Worker:
        self._started += 1
        out = self._out / f"worker-{self._started}"
        worker = _Worker(self._command, self._started, out, self._results, self._shared)
        self._workers.append(worker)
        selector.register(worker.answers, selectors.EVENT_READ, worker)
        return worker

    def _feed(self, worker: _Worker, due: deque[Cell]) -> None:
        if due:
            worker.give(str(due.popleft()))

    def _keep(self, result: CellResult, tell: Callable[[CellResult], None]) -> None:
        self._results.add(result)
        tell(result)

    def _buried(self, worker: _Worker, selector: selectors.BaseSelector, tell: Callable[[CellResult], None]) -> _Worker:
        """A worker died: its cell proved nothing, and another takes its place."""
        self._workers.remove(worker)
        worker.await_end()
        said = f"worker {worker.log.parent.name} ended with {worker.process.returncode}: {read_tail(worker.log)}"
        if worker.cell is not None:
            self._keep(CellResult(cell=worker.cell, verdict=Verdict.UNKNOWN, problems={"worker": said}), tell)
        self._deaths += 1
        if self._deaths > _MOST_DEATHS:
            raise RuntimeError(said)
        return self._start(selector)

    def close(self) -> None:
        """End all workers and the shared store; idempotent."""
        for worker in self._workers:
            worker.end()
        for worker in self._workers:
            worker.await_end()
        self._workers.clear()
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
