"""The registry of failpoints is the code's: every call names a declared one, and every declared one is called."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from ckptd.protos.agent_pb2 import DESCRIPTOR as AGENT
from ckptd.protos.agent_pb2 import Event
from ckptd.protos.boundaries import BOUNDARIES, ROLES
from ckptd.protos.coordinator_pb2 import CoordinatorMessage, NodeMessage

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("client/ckptd/client", "daemon/ckptd/daemon", "storage_backends/ckptd/storage_backends")
# Steps of no protocol, and streams of bytes that only one side sends.
_NO_STEP = {"Status"}


@cache
def made_calls() -> tuple[tuple[Path, str, ast.Call], ...]:
    """Return (file, what is called, the call) of every call in the code; it is read once."""
    return tuple(
        (path, ast.unparse(node.func), node)
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
    )


def calls() -> Iterator[tuple[str, str, str]]:
    """Yield (file, fixed name, the code that makes the rest of it) of each call of `failpoint`."""
    for path, called, node in made_calls():
        if called in {"failpoint", "failpoints.failpoint"}:
            name = node.args[0]
            assert isinstance(name, ast.Constant), f"{path}:{node.lineno}: a failpoint's name is a text"
            yield path.name, str(name.value), "".join(map(ast.unparse, node.args[1:]))


def kinds(message: type) -> set[str]:
    """Return the messages of a oneof called kind."""
    return {field.name for field in message.DESCRIPTOR.oneofs_by_name["kind"].fields}  # type: ignore[attr-defined]


@cache
def labels() -> dict[str, set[str]]:
    """Return the labels of the coordinator's operations, by operation; each has one."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "daemon/ckptd/daemon/coordinator").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"ListKeys", "Get", "GetMany", "Put"}:
                given = {one.arg: one.value for one in node.keywords}
                texts = [part.value for part in ast.walk(given["label"]) if isinstance(part, ast.Constant)]
                found.setdefault(ast.unparse(node.func), set()).update(map(str, texts))
                if isinstance(given["label"], ast.Name):
                    # Chosen by an if: every text that is assigned to the name.
                    name = given["label"].id
                    tree = ast.parse(path.read_text(encoding="utf-8"))
                    assigned = [
                        one.value.value
                        for one in ast.walk(tree)
                        if isinstance(one, ast.Assign)
                        and ast.unparse(one.targets[0]) == name
                        and isinstance(one.value, ast.Constant)
                    ]
                    found["Put"].update(map(str, assigned))
    return found


@cache
def passed() -> frozenset[str]:
    """Return every name that some call makes."""
    rpcs = {method.name for method in AGENT.services_by_name["Agent"].methods} - _NO_STEP
    put, read = labels()["Put"], labels()["ListKeys"] | labels()["Get"] | labels()["GetMany"]
    called = {
        str(node.args[1].value)
        for _, name, node in made_calls()
        if name in {"self._link.call", "self._link.stream"} and isinstance(node.args[1], ast.Constant)
    }
    endings: dict[tuple[str, str], set[str]] = {
        ("link.py", "client.before_"): called,
        ("link.py", "client.after_"): called,
        ("link.py", "client.heard_"): kinds(Event),
        ("rpc.py", "agent.received_"): rpcs,
        ("rpc.py", "agent.before_reply_"): rpcs,
        ("run_link.py", "agent.before_say_"): kinds(NodeMessage),
        ("run_link.py", "agent.heard_"): kinds(CoordinatorMessage),
        ("runner.py", "coordinator.before_"): put | read,
        ("runner.py", "coordinator.after_"): put,
        ("runner.py", "coordinator.before_send_"): kinds(CoordinatorMessage),
        ("runner.py", "coordinator.received_"): kinds(NodeMessage),
    }
    found: set[str] = set()
    for file, name, rest in calls():
        if rest:
            assert (file, name) in endings, f"{file}: it is not known which failpoints {name!r} + {rest} are"
            found |= {name + str(ending) for ending in endings.pop((file, name), ())} or {name}
            endings[file, name] = set()
        else:
            found.add(name)
    return frozenset(name for name in found if not name.endswith("_"))


def test_every_failpoint_in_the_code_is_declared() -> None:
    """A name that code passes stands in the registry."""
    assert sorted(passed() - set(BOUNDARIES)) == []


def test_every_declared_failpoint_is_in_the_code() -> None:
    """A name in the registry is passed by some code."""
    assert sorted(set(BOUNDARIES) - passed()) == []


@pytest.mark.parametrize("role", ROLES)
def test_a_boundary_stands_where_its_role_says(role: str) -> None:
    """A rank's failpoints are in the client, all others in the daemon; each says what lies before and after it."""
    in_client = {
        name for file, name, _ in calls() if (ROOT / PACKAGES[0] / file).exists() and name.startswith("client.")
    }
    mine = [one for one in BOUNDARIES.values() if one.role == role]
    assert mine
    for one in mine:
        assert one.before
        assert one.after
        assert one.name.startswith("client.") == (role == "rank")
        assert one.name.startswith("coordinator.") == (role == "coordinator")
    assert in_client


def test_every_rpc_of_a_rank_has_a_failpoint_on_both_sides() -> None:
    """A new RPC of agent.proto cannot be forgotten."""
    for method in AGENT.services_by_name["Agent"].methods:
        if method.name not in _NO_STEP:
            assert f"client.before_{method.name}" in BOUNDARIES
            assert f"client.after_{method.name}" in BOUNDARIES
            assert f"agent.received_{method.name}" in BOUNDARIES
            assert f"agent.before_reply_{method.name}" in BOUNDARIES
