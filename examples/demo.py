"""The main job, on this machine: eight ranks on two nodes are hurt twice and come back bit for bit.

Runs `train_moe.py` once undisturbed, then once more: a rank gets SIGKILL while its snapshot is still being uploaded
(the job goes on from the agents' shared memory), later a whole node is lost (the job goes on from the store). The
judge compares SHA-256 of every tensor and object that the script computed itself, and every printed loss.

    python examples/demo.py            writes build/demo/result.json; exits 0 only if all bits are equal
"""

import json
import shutil
import sys
import time
from datetime import timedelta
from pathlib import Path

from judge import Judgement, judge
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ckptd.chaos.accounts import Account, accounts
from ckptd.chaos.cluster.store import LocalStore
from ckptd.chaos.conductor import Limits
from ckptd.chaos.history import Event
from ckptd.chaos.leading import TrialError
from ckptd.chaos.scenario import Moment
from ckptd.chaos.schedule import PlannedFault
from ckptd.chaos.trial import Stage, perform

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "build" / "demo"
NODES, RANKS_PER_NODE = 2, 4
MESH = {"pp": 2, "dp_shard": 2, "tp": 2}
STEPS, SAVE_EVERY = 20, 4
COMMAND = (
    *(str(HERE / "train_moe.py"), "--root", "{root}", "--digests", "{digests}", "--out", "{out}"),
    *("--pp", "2", "--dp-shard", "2", "--tp", "2"),
    *("--steps", str(STEPS), "--save-every", str(SAVE_EVERY), "--step-s", "0.4"),
)
# Uploads take a moment, so that there is a time in which a snapshot is staged and not yet in the store.
SLOW_UPLOADS = "uploader.before_put=delay:1.0"
FAULTS = (
    PlannedFault(index=0, do="kill", kind="rank", which=6, at=Moment(event="staged", nth=2, before="sealed")),
    PlannedFault(index=1, do="lose", kind="node", which=0, at=Moment(event="acknowledged", then="step")),
)
EXPECTED = ("slots", "store")


class Narrator:
    """Tells a newcomer what is going on, as it happens."""

    def __init__(self, console: Console, progress: Progress) -> None:
        self._console, self._progress = console, progress
        self._bar: TaskID | None = None

    def begin(self, text: str) -> None:
        self._console.print(f"\n[bold]{text}[/bold]", highlight=False, soft_wrap=True)
        self._bar = self._progress.add_task("starting", total=STEPS)

    def end(self) -> None:
        if self._bar is not None:
            self._progress.remove_task(self._bar)

    def hear(self, _run: str, event: Event) -> None:
        # Ranks keep event logs too; what eight of them say is too much for a newcomer.
        if self._bar is None or event.source.startswith("client"):
            return
        if event.kind == "step":
            self._progress.update(self._bar, completed=event.step, description="training")
        elif line := self._line(event):
            self._progress.update(self._bar, description=event.kind)
            self._console.print(f"  {line}", highlight=False, soft_wrap=True)

    def _line(self, event: Event) -> str | None:
        fields = event.fields
        match event.kind:
            case "launched":
                return f"torchrun starts {NODES * RANKS_PER_NODE} ranks on {NODES} nodes (launch {fields['launch']})"
            case "staged" if event.step:
                return f"step {event.step}: snapshot staged in shared memory; its upload goes on beside training"
            case "acknowledged" if event.step:
                return f"step {event.step}: [green]durable[/green], whatever dies now"
            case "adopted":
                return f"step {event.step}: [green]adopted[/green]: its trainer is dead, its upload was finished"
            case "fault" if fields["do"] == "kill":
                return f"[red]SIGKILL to {fields['target']}[/red] while the snapshot of step {event.step} is uploaded"
            case "fault":
                return f"[red]{fields['target']} is lost[/red]: all its processes, its shared memory and its disk"
            case "node_replaced":
                return "a fresh node takes its place"
            case "exited":
                return "the job is down on all nodes; it is started again, as a scheduler would"
            case "restored" if event.source.startswith("script"):
                tier = "the agents' shared memory" if fields["tier"] == "memory" else "the store"
                return f"[green]restored[/green] step {event.step} (rank 0: from {tier})"
        return None


def main() -> int:
    begun = time.monotonic()
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    console = Console()
    columns = (TextColumn("  {task.description:>12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        narrator = Narrator(console, progress)
        stage = Stage(
            nnodes=NODES,
            nproc=RANKS_PER_NODE,
            command=COMMAND,
            out=OUT,
            limits=Limits(run=timedelta(seconds=240), progress=timedelta(seconds=120)),
            # The judge looks at what the script says, not at what ckptd says of itself.
            read_root=None,
            observe=narrator.hear,
        )
        store = LocalStore(folder=OUT / "store")
        try:
            narrator.begin(f"1. An undisturbed run: {STEPS} steps, a snapshot every {SAVE_EVERY}, mesh {MESH}")
            whole, _ = perform(stage, store, "undisturbed")
            narrator.end()
            narrator.begin("2. The same run, hurt twice")
            performance, _ = perform(stage, store, "hurt", faults=FAULTS, agent_failpoints=SLOW_UPLOADS)
            narrator.end()
        except TrialError as error:
            console.print(f"[red]{error}[/red]")
            return 3
    told = accounts(performance, nproc=RANKS_PER_NODE)
    judgement = judge(OUT / "undisturbed", OUT / "hurt")
    wrong = [
        *_complaints(told),
        *(f"{name} run: {p.why}" for name, p in (("undisturbed", whole), ("hurt", performance)) if p.why),
    ]
    wrong += [f"left behind: {leak}" for leak in performance.leaks]
    result = {
        "bit_exact": judgement.bit_exact,
        "first_difference": judgement.first_difference,
        "nodes": NODES,
        "world": NODES * RANKS_PER_NODE,
        "mesh": MESH,
        "steps": STEPS,
        "launches": performance.launches,
        "faults": [_fault(account) for account in told],
        "tensors_compared": judgement.tensors_compared,
        "objects_compared": judgement.objects_compared,
        "losses_compared": judgement.losses_compared,
        "problems": wrong,
        "seconds": round(time.monotonic() - begun, 1),
    }
    (OUT / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    _conclude(console, judgement, told, wrong, begun)
    return 0 if judgement.bit_exact and not wrong else 1


def _tier(account: Account) -> str | None:
    return "slots" if account.restored_from == "memory" else account.restored_from


def _fault(account: Account) -> dict[str, object]:
    return {
        "kind": account.kind,
        "target": account.target,
        "step": account.step,
        "fired": account.fired and not account.late,
        "restored_step": account.restored_step,
        "restored_from": _tier(account),
        "lost_steps": account.lost_steps,
        "recovery_s": account.recovery_s,
    }


def _complaints(told: list[Account]) -> list[str]:
    wrong = []
    for account, tier in zip(told, EXPECTED, strict=True):
        if not account.fired or account.late:
            wrong.append(f"{account.kind} {account.target} did not strike when it should: {account.note}{account.late}")
        elif _tier(account) != tier:
            wrong.append(
                f"after {account.kind} {account.target} the job was restored from {_tier(account)}, not {tier}"
            )
    if told[0].restored_step != told[0].step:
        wrong.append(f"the snapshot of step {told[0].step} was staged, but step {told[0].restored_step} was restored")
    return wrong


def _conclude(console: Console, judgement: Judgement, told: list[Account], wrong: list[str], begun: float) -> None:
    console.print("\n[bold]3. The judge compares what the training script said in both runs[/bold]")
    for account in told:
        console.print(
            f"  {account.kind} {account.target}: restored step {account.restored_step} from {_tier(account)}, "
            f"{account.lost_steps} steps lost, training again after {account.recovery_s or 0:.0f} s",
            highlight=False,
            soft_wrap=True,
        )
    console.print(
        f"  {judgement.tensors_compared} tensors, {judgement.objects_compared} objects and "
        f"{judgement.losses_compared} losses compared: "
        + ("[bold green]every bit is equal[/bold green]" if judgement.bit_exact else "[bold red]not equal[/bold red]"),
        highlight=False,
        soft_wrap=True,
    )
    for text in [judgement.first_difference or "", *wrong]:
        if text:
            console.print(f"  [red]{text}[/red]", highlight=False, soft_wrap=True)
    console.print(f"  {OUT / 'result.json'}, {time.monotonic() - begun:.0f} s", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
