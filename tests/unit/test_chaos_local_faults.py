"""Faults of processes, disks and clocks: their words, and what is planted into processes for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from ckptd.chaos.cluster.means import require_means
from ckptd.chaos.cluster.planted import Planted, parts_wanted
from ckptd.chaos.history import Event
from ckptd.chaos.local_faults import DEEDS_OF, ClockFault, DiskFault, SlowFault
from ckptd.chaos.nemesis.harm import Harm
from ckptd.chaos.nemesis.injector import Struck
from ckptd.chaos.nemesis.lifting import Lifting
from ckptd.chaos.planted.sitecustomize import RAISE_SIGNAL
from ckptd.chaos.scenario import Fault, Moment, Target
from ckptd.chaos.scenario_reader import ScenarioError, parse
from ckptd.chaos.schedule import PlannedFault, ScheduleError, schedule

DISK = """\
[[fault]]
do = "disk"
disk = "shm"
fault = "full"
target = "node any"
left_kib = 64
size_mib = 32
for_s = 5
at = { event = "staged" }
"""
CLOCK = """\
[[fault]]
do = "clock"
target = "rank 1"
shift_s = -3600
at = { step = 3 }
"""
SLOW = CLOCK.replace('"clock"', '"slow"').replace("shift_s = -3600", "percent = 20\nfor_s = 3")


def planned(text: str) -> tuple[PlannedFault, ...]:
    return schedule(parse(text, name="x", source="x.toml"), nnodes=2, nproc=1, seed=1)


def test_every_word_reaches_the_values_and_the_report() -> None:
    """Numbers, targets and defaults are read, and a planned fault says in words what it is."""
    (disk,) = parse(DISK, name="x", source="x.toml").faults
    assert disk.local == DiskFault(disk="shm", kind="full", left_kib=64, size_mib=32, for_s=5)
    (clock,) = parse(CLOCK, name="x", source="x.toml").faults
    assert clock == Fault(
        do="clock", target=Target(kind="rank", which=1), at=Moment(step=3), local=ClockFault(shift_s=-3600)
    )
    (slow,) = planned(SLOW)
    assert slow.local == SlowFault(percent=20, for_s=3)
    assert slow.target == "rank 1, which runs 20 % of the time"
    assert planned(CLOCK)[0].target == "rank 1, 3600 s behind"
    store = DISK.replace('"shm"', '"store"').replace('target = "node any"\n', "")
    assert planned(store)[0].target == "store: full"
    assert planned(store)[0].kind == "store"
    for do in ("segfault", "terminate", "raise", "hang"):
        assert planned(CLOCK.replace('"clock"', f'"{do}"').replace("shift_s = -3600\n", ""))[0].target == "rank 1"
    reboot = CLOCK.replace('"clock"', '"reboot"').replace('"rank 1"', '"node 1"').replace("shift_s = -3600\n", "")
    assert planned(reboot)[0].do == "reboot"


@pytest.mark.parametrize(
    ("text", "old", "new", "line", "words"),
    [
        (DISK, '"full"', '"slow"', 4, "fault is 'slow'; allowed: full, read_only, quota, fsync, close"),
        (DISK, '"full"', '"fsync"', 4, "a disk of shm cannot be fsync; allowed: full, quota"),
        (DISK, 'fault = "full"\n', "", 1, "a fault of a disk needs fault; allowed: full, quota"),
        (DISK, '"shm"', '"floppy"', 3, "disk is 'floppy'; allowed: store, shm, data, run"),
        (DISK, 'disk = "shm"\n', "", 1, "a fault of a disk needs disk, one of store, shm, data, run"),
        (DISK, '"shm"', '"store"', 5, "the store's disk is nobody's own: leave target out"),
        (DISK, '"node any"', '"rank 0"', 2, "disk cannot be done to rank; disk goes with: node, coordinator, all"),
        (DISK, "left_kib = 64", "left_kib = 0", 6, "whole number from 1"),
        (DISK, '"full"\ntarget = "node any"', '"quota"\ntarget = "node any"', 6, "left_kib goes with full only"),
        (DISK, "left_kib = 64", "left = 64", 6, "unknown key 'left'; allowed: do, target, at, disk, fault, left_kib"),
        (DISK, 'event = "staged"', 'failpoint = "x"', 9, "a failpoint kills or stops"),
        (CLOCK, "-3600", "0", 4, "needs shift_s, seconds from 60 to 86400, negative where it is behind; not 0"),
        (CLOCK, "shift_s = -3600\n", "", 1, "a fault of a clock needs shift_s"),
        (CLOCK, "-3600", "90000", 4, "not 90000"),
        (SLOW, "percent = 20", "percent = 95", 4, "percent is a whole number from 1 to 90, not 95"),
        (SLOW, "for_s = 3\n", "", 1, "slow needs percent (1..90, the share of time that it runs) and for_s"),
        (SLOW, '"slow"', '"hang"', 4, "unknown key 'percent'; allowed: do, target, at"),
        (
            CLOCK,
            '"clock"',
            '"overheat"',
            2,
            "allowed: kill, stop, continue, lose, store, network, segfault, terminate, raise",
        ),
        (CLOCK, 'target = "rank 1"\n', "", 1, "unknown target ''; allowed: rank N|any|last"),
    ],
)
def test_what_cannot_be_is_refused_with_line_and_allowed_words(
    text: str, old: str, new: str, line: int, words: str
) -> None:
    """Unknown words and impossible pairs never start anything."""
    assert old in text
    with pytest.raises(ScenarioError) as caught:
        parse(text.replace(old, new), name="x", source="x.toml")
    assert str(caught.value).startswith(f"x.toml:{line}: ")
    assert words in str(caught.value)


@pytest.mark.parametrize("do", DEEDS_OF)
def test_every_deed_refuses_the_targets_it_cannot_be_done_to(do: str) -> None:
    """Each deed has targets that make no sense for it, and says which do."""
    numbers = {"slow": "percent = 5\nfor_s = 1\n", "clock": "shift_s = 60\n", "disk": 'disk = "shm"\nfault = "full"\n'}
    for target in {"rank", "agent", "node", "all"} - set(DEEDS_OF[do]):
        name = target if target == "all" else f"{target} 0"
        text = f'[[fault]]\ndo = "{do}"\ntarget = "{name}"\n{numbers.get(do, "")}at = {{ step = 1 }}\n'
        with pytest.raises(ScenarioError, match=rf"x.toml:2: {do} cannot be done to {target}; {do} goes with: "):
            parse(text, name="x", source="x.toml")


def test_the_disk_of_an_s3_store_is_refused_with_the_way_out() -> None:
    """There is no file system of ours behind it."""
    text = DISK.replace('"shm"', '"store"').replace('target = "node any"\n', "")
    with pytest.raises(ScheduleError, match="say --store local"):
        require_means(planned(text), store="s3")


# ------------------------------------------------------------ what is planted


def run_planted(tmp_path: Path, planted: Planted, script: str, *ranks: int, **more: str) -> subprocess.Popen[str]:
    environment = {**os.environ, **more}
    environment |= planted.variables("0", ranks, environment)
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=environment,
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_clock_is_shifted_in_the_midst_of_a_process_and_of_that_process_alone(tmp_path: Path) -> None:
    """Seconds, nanoseconds and datetimes move together and move back; types stay what they were; the log proves it."""
    planted = Planted(tmp_path / "planted", ["clock"])
    script = """
        import datetime, sys, time
        from datetime import datetime as named
        for line in sys.stdin:
            now = datetime.datetime.now(datetime.timezone.utc)
            assert isinstance(now, named) and isinstance(datetime.datetime.fromtimestamp(0), named)
            print(time.time(), time.time_ns() / 1e9, now.timestamp(), time.monotonic() > 0, flush=True)
    """
    with run_planted(tmp_path, planted, script, 0, 1, RANK="1") as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def shown() -> list[float]:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            line = process.stdout.readline()
            return [round((float(word) - time.time()) / 60) for word in line.split()[:3]]

        assert shown() == [0, 0, 0]
        planted.set_clock("0", "1", -3600)
        assert shown() == [-60, -60, -60]
        planted.set_clock("0", None, 7200)  # of the whole node, besides its own
        assert shown() == [60, 60, 60]
        planted.set_clock("0", "1", 0)
        planted.set_clock("0", None, 0)
        planted.set_clock("0", "agent", 500)  # somebody else's
        assert shown() == [0, 0, 0]
        process.stdin.close()
    assert (tmp_path / "planted" / "0" / "struck.log").read_text().splitlines()[0].split()[1:] == ["clock", "-3600.0"]


def test_events_of_a_wrong_clock_get_their_true_time(tmp_path: Path) -> None:
    """What was logged before, during and after a fault is set right, ahead or behind, whoever logged it."""
    planted = Planted(tmp_path / "planted", ["clock"])
    planted.variables("0", [0], {})
    planted.variables("1", [1], {})
    now = round(time.time(), 3)
    for shift in (3600.0, -3600.0, 90.0):
        planted.set_clock("1", None, shift)
        for off in (0.0, shift):
            event = Event(t=now - 5 + off, source="agent 1", kind="begun")
            assert planted.true_time(event).t == pytest.approx(now - 5, abs=0.01)


def test_a_disk_refuses_one_call_below_one_folder(tmp_path: Path) -> None:
    """Writes, syncs and closes of what was written fail with their error; others, and other folders, do not."""
    script = """
        import errno, os, sys
        def tried(call):
            try:
                call()
            except OSError as error:
                return errno.errorcode[error.errno]
            return "ok"
        def one(folder):
            fd = os.open(folder + "/file", os.O_RDWR | os.O_CREAT)
            told = [tried(lambda: os.write(fd, b"x")), tried(lambda: os.fsync(fd)), tried(lambda: os.posix_fallocate(fd, 0, 9))]
            told.append(tried(lambda: os.close(fd)))
            assert tried(lambda: os.fstat(fd)) == "EBADF"  # whatever it said, it has closed
            reading = os.open(folder + "/file", os.O_RDONLY)
            return told + [tried(lambda: os.close(reading))]
        for line in sys.stdin:
            print(*one("sick"), *one("well"), flush=True)
    """
    for name in ("sick", "well"):
        (tmp_path / name).mkdir()
    planted = Planted(tmp_path / "planted", ["disk"])
    with run_planted(tmp_path, planted, script, 0) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for kind, expected in (
            ("quota", "EDQUOT ok EDQUOT ok ok"),
            ("fsync", "ok ENOSPC ok ok ok"),
            ("close", "ok ok ok ENOSPC ok"),
        ):
            fault = DiskFault(disk="store", kind=kind)
            planted.refuse("0", fault, tmp_path / "sick")
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline().split() == [*expected.split(), *["ok"] * 5]
            planted.accept("0", fault, tmp_path / "sick")
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline().split() == ["ok"] * 10
        process.stdin.close()


def test_an_exception_comes_in_the_main_thread_of_a_rank_and_of_nobody_else(tmp_path: Path) -> None:
    """The rank ends with a traceback of its own; the sitecustomize that ours hides has run all the same."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.hidden_one_has_run = True")
    planted = Planted(tmp_path / "planted", ["raise"])
    script = """
        import sys, time
        print(sys.hidden_one_has_run, flush=True)
        while True:
            time.sleep(0.01)
    """
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    with run_planted(tmp_path, planted, script, 0, RANK="0", PYTHONPATH=path) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "True\n"
        os.kill(rank.pid, RAISE_SIGNAL)
        assert rank.wait(20) == 1
        assert rank.stdout.read().splitlines()[-1] == "sitecustomize.InjectedError: this rank was told to raise"
    with run_planted(tmp_path, planted, script, 0, PYTHONPATH=path) as other:
        assert other.stdout is not None
        other.stdout.readline()
        caught = next(line for line in Path(f"/proc/{other.pid}/status").read_text().splitlines() if "SigCgt" in line)
        assert not int(caught.split()[1], 16) >> (RAISE_SIGNAL - 1) & 1
        other.send_signal(signal.SIGKILL)


def test_what_no_process_has_shown_was_not_done(tmp_path: Path) -> None:
    """A planted fault counts as fired when a process's log has its word; faults from outside need none."""
    planted = Planted(tmp_path / "planted", ["clock", "disk"])
    planted.variables("0", [0], {})
    (clock,) = planned(CLOCK)
    (kill,) = planned(CLOCK.replace('"clock"', '"hang"').replace("shift_s = -3600\n", ""))
    assert parts_wanted([clock, kill]) == ("clock",)
    struck = [Struck(fault=clock, fired=True, note=""), Struck(fault=kill, fired=True, note="")]
    assert [(fate.fired, fate.note) for fate in planted.proved(struck)] == [
        (False, "no process has shown it (clock)"),
        (True, ""),
    ]
    (tmp_path / "planted" / "0" / "struck.log").write_text("1 clock -3600.0\n")
    assert [fate.fired for fate in planted.proved(struck)] == [True, True]


def test_faults_are_taken_back_when_due_or_at_the_end() -> None:
    """Each once: at its time, or with everything else; and each is told."""
    undone: list[str] = []
    told: list[object] = []
    lifting = Lifting(lambda _kind, **fields: told.append(fields["what"]))
    lifting.note(Harm(pids=(), undo=lambda: undone.append("now"), what="now", undo_after_s=0))
    lifting.note(Harm(pids=(), undo=lambda: undone.append("end"), what="end"))
    lifting.note(Harm(pids=(1,)))
    lifting.lift()
    lifting.lift()
    assert undone == ["now"]
    lifting.lift(everything=True)
    lifting.lift(everything=True)
    assert undone == told == ["now", "end"]
