"""Scenario files: what is refused and how, and what the package's own ones say."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from ckptd.chaos.moment_names import EVENTS, EVENTS_BEFORE
from ckptd.chaos.scenario import Expectation, Fault, Moment, StoreFault, Target
from ckptd.chaos.scenario_reader import ScenarioError, load, parse, scenario_names

GOOD = """\
title = "t"

[failpoints]
agents = "uploader.before_put=delay:0.1"

[[fault]]
do = "kill"
target = "rank any"
at = { event = "staged", nth = 2, before = "sealed" }

[[fault]]
do = "lose"
target = "node 1"
at = { step = 12 }

[expect]
restored_from = ["memory"]
restored_step = "fault"
relaunches = [2, 2]
lost_steps_max = 4
recovery_s_max = 120
"""


def test_a_scenario_says_whom_what_and_when() -> None:
    """Every word of a file reaches the values."""
    read = parse(GOOD, name="x", source="x.toml")
    assert read.agent_failpoints == "uploader.before_put=delay:0.1"
    assert read.faults == (
        Fault(do="kill", target=Target(kind="rank", which="any"), at=Moment(event="staged", nth=2, before="sealed")),
        Fault(do="lose", target=Target(kind="node", which=1), at=Moment(step=12)),
    )
    assert read.expect.restored_from == ("memory",)
    assert read.expect.relaunches == (2, 2)
    assert (read.expect.lost_steps_max, read.expect.recovery_s_max) == (4, 120)
    assert parse(GOOD.partition("[expect]")[0], name="x", source="x.toml").expect == Expectation()


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ('do = "kill"', 'do = "maim"', 7, "'maim'; allowed: kill, stop, continue, lose"),
        ('target = "rank any"', 'target = "cable 3"', 8, "unknown target 'cable 3'; allowed: rank N|any|last"),
        ('target = "rank any"', 'target = "rank"', 8, "does not say which rank"),
        ('target = "node 1"', 'target = "rank 1"', 12, "lose cannot be done to rank; allowed: kill, stop, continue"),
        ("nth = 2", "nht = 2", 9, "unknown key 'nht'; allowed: step, event, failpoint, nth, then, before"),
        ("nth = 2", "nth = 0", 9, "whole number from 1"),
        ("{ step = 12 }", "{ }", 14, "exactly one of step, event, failpoint"),
        ("{ step = 12 }", '{ step = 12, event = "x" }', 14, "exactly one of step, event, failpoint"),
        ("{ step = 12 }", '{ failpoint = "x" }', 14, "a failpoint kills or stops an agent"),
        ('restored_from = ["memory"]', 'restored_from = ["moon"]', 17, "memory, mixed, store"),
        ("lost_steps_max = 4", "lost_steps_max = -1", 20, "lost_steps_max is a whole number from 0, not -1"),
        ("recovery_s_max = 120", 'recovery_s_max = "2m"', 21, "recovery_s_max is a whole number from 0, not '2m'"),
        ("[expect]", "[expects]", 16, "unknown key 'expects'; allowed: title, proves, needs, failpoints, fault"),
        ('target = "rank any"', 'target = "rank ²"', 8, "does not say which rank"),
        ("relaunches = [2, 2]", "relaunches = [true, 2]", 19, "relaunches is [fewest, most]"),
    ],
)
def test_what_is_wrong_is_refused_with_line_and_allowed_words(old: str, new: str, line: int, words: str) -> None:
    """An unknown key, target, deed or moment names its line and what may stand there."""
    with pytest.raises(ScenarioError) as caught:
        parse(GOOD.replace(old, new, 1), name="x", source="x.toml")
    assert str(caught.value).startswith(f"x.toml:{line}: ")
    assert words in str(caught.value)


AGENT = """\
[[fault]]
do = "kill"
target = "agent 1"
at = { failpoint = "uploader.before_put", nth = 2 }
"""


@pytest.mark.parametrize(
    ("text", "old", "new", "line", "words"),
    [
        (GOOD, "before_put", "befor_put", 4, "no failpoint 'uploader.befor_put' (did you mean uploader.before_put"),
        (
            GOOD,
            "uploader.before_put=delay:0.1",
            "nonsense",
            4,
            "'nonsense' is not name=action[@nth] with action one of",
        ),
        (GOOD, "=delay:0.1", "=delay:soon", 4, "is not name=action[@nth] with action one of"),
        (
            GOOD,
            "uploader.before_put",
            "client.before_copy",
            4,
            "'client.before_copy' is passed by a rank, not by an agent",
        ),
        (GOOD, "uploader.before_put", "sweep.before_list", 4, "passed by a verb, not by an agent; allowed: those of"),
        (
            GOOD,
            '"staged"',
            '"stagd"',
            9,
            "no event 'stagd' (did you mean staged or started or staged_local?); allowed: ack",
        ),
        (GOOD, '"staged"', '"qqqq"', 9, "there is no event 'qqqq'; allowed: acknowledged, adopted, attached"),
        (GOOD, '"staged"', '""', 9, "there is no event ''; allowed: acknowledged"),
        (GOOD, '"staged"', '"save_returned"', 9, "stands in the logs of ranks alone"),
        (GOOD, '"staged"', '"launched"', 9, "there is no event 'launched'"),
        (GOOD, '"sealed"', '"seald"', 9, "no event 'seald' (did you mean sealed or sealed-local"),
        (
            GOOD,
            '"sealed"',
            '"claimed"',
            9,
            "before is 'claimed', which is no event of an agent that tells its step; allowed:",
        ),
        (AGENT, "before_put", "befor_put", 4, "no failpoint 'uploader.befor_put' (did you mean uploader.before_put"),
        (AGENT, "uploader.before_put", "", 4, "there is no failpoint ''"),
        (AGENT, "uploader.before_put", "client.before_copy", 4, "passed by a rank, not by an agent; allowed: those of"),
        (
            AGENT,
            "uploader.before_put",
            "coordinator.before_claim",
            4,
            'which is agent 0; allowed: target = "coordinator"',
        ),
        (AGENT, '"agent 1"', '"rank 1"', 4, "a failpoint kills or stops an agent or the coordinator"),
        ("fault = [3]\n", "3", "3", 1, "a fault is a table, written as [[fault]], not 3"),
        ('title = "x"\nfault = ["kill"]\n', "x", "y", 2, "a fault is a table, written as [[fault]], not 'kill'"),
        ("fault = 3\n", "3", "3", 1, "a scenario has at least one [[fault]]"),
    ],
)
def test_what_nobody_ever_says_or_passes_is_refused(text: str, old: str, new: str, line: int, words: str) -> None:
    """A moment that cannot come is said before anything starts, with near names, and not after all runs as a missed fault."""
    assert old in text
    with pytest.raises(ScenarioError) as caught:
        parse(text.replace(old, new, 1), name="x", source="x.toml")
    assert str(caught.value).startswith(f"x.toml:{line}: ")
    assert words in str(caught.value)


def test_a_failpoint_of_the_coordinator_is_passed_by_the_agent_of_rank_0() -> None:
    """It may be said of either; and the coordinator's agent passes what every agent does."""
    for target, failpoint in itertools.product(
        ("agent 0", "coordinator"), ("coordinator.before_claim", "held.before_stage")
    ):
        text = AGENT.replace("agent 1", target).replace("uploader.before_put", failpoint)
        assert parse(text, name="x", source="x.toml").faults[0].at == Moment(failpoint=failpoint, nth=2)


def test_every_event_of_an_agent_or_script_can_be_waited_for() -> None:
    """What is declared is taken; so is what only says that a fault came too late, where it tells its step."""
    for kind in EVENTS:
        before = kind if kind in EVENTS_BEFORE else "sealed"
        text = GOOD.replace('"staged"', f'"{kind}"').replace('"sealed"', f'"{before}"')
        assert parse(text, name="x", source="x.toml").faults[0].at == Moment(event=kind, nth=2, before=before)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """No traceback of a decoder."""
    (tmp_path / "x.toml").write_bytes(b"title = '\xff'")
    with pytest.raises(ScenarioError, match=r"x\.toml cannot be read: .*utf-8"):
        load(str(tmp_path / "x.toml"))


def test_toml_that_is_none_is_refused_with_its_place() -> None:
    """A syntax error is a scenario error with the parser's own position."""
    with pytest.raises(ScenarioError, match=r"x\.toml: .*line 1"):
        parse("title = \n", name="x", source="x.toml")


def test_only_the_first_fault_may_wait_for_a_failpoint() -> None:
    """Failpoints are given to agents at their start, so a later fault cannot use one."""
    text = GOOD.replace('"node 1"', '"agent 1"').replace('"lose"', '"kill"').replace("step = 12", 'failpoint = "a"')
    with pytest.raises(ScenarioError, match="only the first fault"):
        parse(text, name="x", source="x.toml")


@pytest.mark.parametrize("verb", ["kill", "stop@2", "exit:3"])
def test_failpoints_of_all_agents_may_not_end_them(verb: str) -> None:
    """Each agent that is started again would meet it again, and no fault of the scenario would answer for it."""
    text = GOOD.replace("delay:0.1", verb)
    with pytest.raises(ScenarioError, match=rf"x\.toml:\d+: .*uploader\.before_put={verb[:4]} would meet every agent"):
        parse(text, name="x", source="x.toml")


def test_every_scenario_of_the_package_can_be_read() -> None:
    """All are there, and each says what it proves."""
    assert set(scenario_names()) >= {
        "agent-killed-mid-upload",
        "connections-reset",
        "agent-terminated",
        "clock-off",
        "coordinator-killed-after-decision",
        "coordinator-killed-before-decision",
        "coordinator-partitioned",
        "everything-killed",
        "everything-lost",
        "node-lost",
        "one-way-loss",
        "partition-for-good",
        "partition-heals",
        "node-rebooted",
        "rank-hung",
        "rank-raises",
        "rank-segfaults",
        "rank-slow",
        "shared-memory-full",
        "store-disk-full",
        "rank-killed-between-saves",
        "rank-killed-while-uploading",
        "slow-network",
        "store-outage",
        "store-slow-down",
        "zombie-coordinator",
    }
    for name in scenario_names():
        read = load(name)
        assert read.title
        assert read.proves
        assert read.faults


def test_an_unknown_scenario_is_refused_with_all_names() -> None:
    """Whoever mistypes a name sees the names."""
    with pytest.raises(ScenarioError, match="there are: agent-killed-mid-upload, agent"):
        load("node-loost")


STORE = """\
[[fault]]
do = "store"
fault = "slow_down"
match = "put chunks/"
for_s = 8
at = { event = "staged" }
"""


def test_a_fault_of_the_store_says_what_which_calls_and_how_long() -> None:
    """Verb, prefix and numbers reach the values; with a time or a limit the number of calls has no bound, else it is 1."""

    def read(text: str) -> StoreFault | None:
        return parse(text, name="x", source="x.toml").faults[0].store

    assert read(STORE) == StoreFault(kind="slow_down", op="put", prefix="chunks/", times=None, for_s=8)
    assert read(STORE.replace("put chunks/", "list").replace("for_s = 8\n", "")) == StoreFault(
        kind="slow_down", op="list"
    )
    limit = STORE.replace("slow_down", "limit").replace("put chunks/", "log/").replace("for_s", "per_s")
    assert read(limit) == StoreFault(kind="limit", prefix="log/", times=None, per_s=8)


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ('"slow_down"', '"earthquake"', 3, "'earthquake'; allowed: error, slow_down, limit"),
        ('fault = "slow_down"\n', "", 1, "needs fault, one of error"),
        ("put chunks/", "chunks", 4, "'chunks' is no match; allowed: a prefix such as chunks/, one of put, get"),
        ("for_s = 8", "for_s = 0", 5, "whole number from 1"),
        ('"slow_down"', '"drip"', 1, "drip needs bytes_per_s"),
        ('"slow_down"', '"corrupted"', 1, "corrupted cannot strike put; allowed: get"),
        ('"slow_down"', '"outage"', 4, "an outage strikes every request"),
        ('match = "put chunks/"', 'target = "all"', 4, "unknown key 'target'; allowed: do, fault, match"),
        ('event = "staged"', 'failpoint = "uploader.after_put"', 6, "a failpoint kills or stops"),
    ],
)
def test_a_wrong_fault_of_the_store_is_refused_with_its_line(old: str, new: str, line: int, words: str) -> None:
    """What cannot be is said with file, line and what is allowed."""
    with pytest.raises(ScenarioError) as caught:
        parse(STORE.replace(old, new), name="x", source="x.toml")
    assert str(caught.value).startswith(f"x.toml:{line}: ")
    assert words in str(caught.value)
