"""Tells a trial as it goes: on a terminal with a line that moves, elsewhere in plain lines.

Owns: what is worth a line, and how the present step is shown. Does not own: the report (`report`). Output only; a
trial runs the same without it.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.text import Text

from ckptd.chaos.history import Event

_TOLD = (
    "launched",
    "restored",
    "fault",
    "agent_died",
    "node_replaced",
    "node_rebooted",
    "lifted",
    "given_up",
    "exited",
    "fenced",
    "adopted",
    "deadline",
    "cached",
)
_SHOWN = (
    "launch",
    "step",
    "tier",
    "do",
    "target",
    "fired",
    "note",
    "agent",
    "code",
    "codes",
    "node",
    "by",
    "what",
    "seconds",
)
_LOUD = frozenset({"fault", "agent_died", "exited", "deadline"})
_GOOD = frozenset({"restored", "adopted"})


class Progress:
    """Shows what happens. A context manager; for one thread.

    Args:
        console: Where; a line that moves is drawn only where it is a terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars: Bars | None = None
        self._task: TaskID | None = None
        self._run = ""
        self._launch = 0
        # Steps of the undisturbed run: how far a later one has to go.
        self._last_step: dict[str, int] = {}

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[at]}"),
                TimeElapsedColumn(),
            )
            self._bars = Bars(*columns, console=self._console, transient=True)
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = self._task = None

    def see(self, run: str, event: Event) -> None:
        """Take in an event of the run named `run`."""
        self._move(run, event)
        if self._is_told(event):
            self._console.print(self._line(run, event), soft_wrap=True)

    def _is_told(self, event: Event) -> bool:
        who = event.source.partition(" ")[0]
        # The script's word for a restore is enough; agents and ranks say it too.
        return event.kind in _TOLD and who != "client" and (event.kind != "restored" or who == "script")

    def _line(self, run: str, event: Event) -> Text:
        fields = " ".join(f"{k}={v}" for k, v in event.fields.items() if k in _SHOWN and v not in (None, ""))
        style = "bold red" if event.kind in _LOUD else "green" if event.kind in _GOOD else "dim"
        return Text(f"{run}: {event.source}: {event.kind} {fields}".rstrip(), style=style)

    def _move(self, run: str, event: Event) -> None:
        if event.kind == "launched":
            self._launch = int(event.fields.get("launch", 0))
        if event.kind == "step" and event.step is not None:
            self._last_step[run] = max(event.step, self._last_step.get(run, 0))
        if self._bars is None:
            return
        if run != self._run or self._task is None:
            if self._task is not None:
                self._bars.remove_task(self._task)
            self._run = run
            known = max((step for name, step in self._last_step.items() if name != run), default=None)
            self._task = self._bars.add_task(run, total=known, at="")
        if event.kind == "launched":
            self._bars.update(self._task, at=f"launch {self._launch}: starting", refresh=True)
        elif event.kind == "step" and event.step is not None:
            text = f"launch {self._launch}: step {event.step}"
            self._bars.update(self._task, completed=event.step, at=text)
