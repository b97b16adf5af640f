"""The documentation says what is: links, verbs, flags, variables, settings, events, reasons and the .proto files."""

from __future__ import annotations

import ast
import importlib.util
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
import typer.main

from ckptd.client import config as client_config
from ckptd.client.errors import from_wire
from ckptd.daemon.cli.exit_codes import ExitCode, code_of
from ckptd.daemon.config import AgentConfig, load_config, printed
from ckptd.daemon.errors import DaemonError
from ckptd.protos import event_kinds, failpoints
from ckptd.protos.error_pb2 import Error, Reason

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    {
        *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "protos/README.md")),
        *ROOT.glob("docs/**/*.md"),
    }
)
DEPLOY = sorted(path for path in (ROOT / "deploy").rglob("*") if path.is_file())
PROTOS = sorted((ROOT / "protos/ckptd/protos").glob("*.proto"))

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_VERB_LINE = re.compile(r"^\s*(?:\$ |sudo |exec )?(?:[\w.~/-]*/)?ckptd (?P<rest>[a-z].*)$", re.MULTILINE)
_VARIABLE = re.compile(r"\bCKPTD_[A-Z][A-Z_]*[A-Z]\b")
_SAID_OF_THE_HARNESS = {"CKPTD_CHAOS_TAG"}


def named(path: Path) -> str:
    """Return a path as test ids show it."""
    return str(path.relative_to(ROOT))


def prose(text: str) -> str:
    """Return a page without its fenced blocks."""
    return _FENCE.sub("", text)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", prose(page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    """A link within the repository names a file that exists, and a heading that it has."""
    broken = []
    for target in _LINK.findall(prose(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken, f"{named(page)}: {broken}"


# ---------------------------------------------------------------- commands


@cache
def verbs() -> dict[str, str]:
    """Return the verbs of the distribution, and what each names."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        return dict(tomllib.load(file)["project"]["entry-points"]["ckptd.commands"])


@cache
def options(verb: str) -> frozenset[str]:
    """Return all options of a verb and its sub-commands."""
    module, _, name = verbs()[verb].partition(":")
    target = getattr(import_module(module), name)
    if not isinstance(target, typer.Typer):
        app = typer.Typer()
        app.command(verb)(target)
        target = app
    return frozenset(_options(typer.main.get_command(target)))


def _options(command: Any) -> Iterator[str]:
    yield "--help"
    for parameter in command.params:
        if parameter.param_type_name == "option":
            yield from (*parameter.opts, *parameter.secondary_opts)
    for one in getattr(command, "commands", {}).values():
        yield from _options(one)


def command_lines(text: str, *, is_page: bool) -> list[str]:
    """Return everything after `ckptd ` in code of a page, or in a file of deploy/."""
    if not is_page:
        return [match["rest"] for match in re.finditer(r"\bckptd (?P<rest>agent\b.*)$", text, re.MULTILINE)]
    text = text.replace("\\\n", " ")
    blocks = "\n".join(
        body for language, body in _FENCE.findall(text) if language in {"", "sh", "bash", "console", "text"}
    )
    spans = "\n".join(re.findall(r"`([^`\n]+)`", prose(text)))
    return [match["rest"] for match in _VERB_LINE.finditer(f"{blocks}\n{spans}")]


@pytest.mark.parametrize("page", [*PAGES, *DEPLOY], ids=named)
def test_every_command_named_exists(page: Path) -> None:
    """A verb of ckptd that a page names is there, with the options named beside it."""
    wrong = []
    for line in command_lines(page.read_text(encoding="utf-8"), is_page=page.suffix == ".md"):
        words = line.split(" -- ")[0].split()
        if words[0] not in verbs():
            wrong.append(line)
        else:
            given = {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}
            wrong += [f"{line}: {option}" for option in sorted(given - options(words[0]))]
    assert not wrong


@pytest.mark.parametrize("page", [*PAGES, *DEPLOY], ids=named)
def test_every_variable_named_is_read(page: Path) -> None:
    """A CKPTD_* variable that a page names is a setting of the agent or the client, or read by failpoints or a test."""
    known = {f"CKPTD_{key.upper()}" for key in (*AgentConfig.model_fields, *client_config.Config.model_fields)}
    known |= {failpoints.ENVIRONMENT_VARIABLE, failpoints.LOG_VARIABLE, *_SAID_OF_THE_HARNESS}
    if page.name == "CONTRIBUTING.md":  # what tests read is told to those who run them, and to nobody else
        tests = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("**/*.py")]
        known |= {name for text in tests for name in re.findall(r"\"(CKPTD_(?:TEST|SOAK)_[A-Z]+)\"", text)}
    assert not set(_VARIABLE.findall(page.read_text(encoding="utf-8"))) - known


@pytest.mark.parametrize("page", DEPLOY, ids=named)
def test_deployment_examples_use_real_flags(page: Path) -> None:
    """Every option in a file of deploy/ that looks like one of the agent's is one."""
    text = re.sub(r"^\s*#.*$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    given = set(re.findall(r"(?<=[\s\"'])--[a-z][a-z-]*", text))
    assert given <= options("agent")


# ---------------------------------------------------------------- settings


def settings_tables() -> ModuleType:
    """Return the script that writes the tables of settings."""
    spec = importlib.util.spec_from_file_location("settings_tables", ROOT / "docs/settings_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_of_settings_are_those_of_the_code() -> None:
    """docs/configuration.md lists every setting as it is; `python docs/settings_tables.py` rewrites it."""
    script = settings_tables()
    text = script.PAGE.read_text(encoding="utf-8")
    assert script.page_with_tables(text) == text


def test_printed_settings_are_a_configuration_file(tmp_path: Path) -> None:
    """What `ckptd agent --print-config` prints can be given back with --config and means the same."""
    settings, origins = load_config({"listen": "10.0.0.7", "event_log": tmp_path / "events.jsonl"}, environment={})
    file = tmp_path / "agent.toml"
    file.write_text(printed(settings, origins), encoding="utf-8")
    assert load_config({}, file=file, environment={})[0] == settings


def test_the_example_configuration_is_valid(tmp_path: Path) -> None:
    """The TOML that docs/configuration.md shows is accepted."""
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    shown = [body for language, body in _FENCE.findall(page) if language == "toml"]
    assert shown
    for number, body in enumerate(shown):
        file = tmp_path / f"{number}.toml"
        file.write_text(body, encoding="utf-8")
        load_config({}, file=file, environment={})


# ---------------------------------------------------------------- rooms


@pytest.mark.parametrize("folder", ["daemon", "client", "storage_backends"])
def test_every_room_is_on_the_map(folder: str) -> None:
    """docs/architecture.md names every module of the package, or the folder it stands in."""
    section = (
        (ROOT / "docs/architecture.md").read_text(encoding="utf-8").partition("## Rooms")[2].partition("## Threads")[0]
    )
    rooms = {
        path.stem if path.is_file() else f"{path.name}/"
        for path in (ROOT / folder / "ckptd" / folder).iterdir()
        if (path.suffix == ".py" or (path / "__init__.py").exists()) and not path.name.startswith("_")
    }
    missing = sorted(rooms - set(re.findall(r"`([a-z0-9_]+/?)`", section)))
    assert not missing


# ---------------------------------------------------------------- events

_EVENT_CALLS = {"emit", "_emit", "log", "_line"}


def emitted(*folders: str) -> dict[str, set[str]]:
    """Return every kind of event that the code of some folders emits, of all by default, with the fields it gives."""
    found: dict[str, set[str]] = {}
    for folder in folders or ("daemon/ckptd/daemon", "client/ckptd/client", "protos/ckptd/protos"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and node.func.attr in _EVENT_CALLS
                ):
                    for kind in _kinds(node):
                        found.setdefault(kind, set()).update(_fields(node))
    return found


def _kinds(call: ast.Call) -> list[str]:
    """Return the kinds a call may emit: a text, or one of two."""
    for argument in call.args[:2]:
        parts = [argument.body, argument.orelse] if isinstance(argument, ast.IfExp) else [argument]
        texts = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
        if texts:
            return texts
    return []


def _fields(call: ast.Call) -> Iterator[str]:
    """Yield the fields a call gives: keywords, or the keys of a dict."""
    yield from (one.arg for one in call.keywords if one.arg)
    for argument in call.args:
        if isinstance(argument, ast.Dict):
            yield from (
                key.value for key in argument.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)
            )


def documented_events(*, but_section: str = "") -> dict[str, set[str]]:
    """Return the kinds of docs/events.md with their fields, without those of one section."""
    found: dict[str, set[str]] = {}
    page = (ROOT / "docs/events.md").read_text(encoding="utf-8")
    if but_section:
        before, _, rest = page.partition(f"{but_section}\n")
        page = before + rest.partition("\n## ")[2]
    for row in re.finditer(r"^\| `([\w-]+)` \| .* \| (.*) \|$", page, re.MULTILINE):
        found.setdefault(row[1], set()).update(re.findall(r"`(\w+)`", row[2]))
    return found


def test_every_kind_of_event_is_documented() -> None:
    """docs/events.md lists every kind of line the code writes, and no other."""
    assert set(emitted()) <= set(documented_events())
    assert set(documented_events()) <= set(emitted())


def test_every_kind_of_event_is_declared_with_its_writer() -> None:
    """Whoever waits for an event by its name asks `event_kinds`: agents, coordinators and clients emit what stands there."""
    leads = set(emitted("daemon/ckptd/daemon/coordinator")) | {"coordinator_closed"}
    assert leads == set(event_kinds.OF_COORDINATORS)
    assert set(emitted("daemon/ckptd/daemon")) - leads <= set(event_kinds.OF_AGENTS)
    assert leads | set(event_kinds.OF_AGENTS) == set(emitted("daemon/ckptd/daemon"))
    assert set(emitted("client/ckptd/client")) == set(event_kinds.OF_CLIENTS)
    assert set(emitted("protos/ckptd/protos")) == set(event_kinds.OF_ALL)


def test_the_events_that_tell_their_step_are_declared() -> None:
    """Those of agents and coordinators that docs/events.md gives the field `step`."""
    page = documented_events(but_section="## The client's")
    assert {kind for kind, fields in page.items() if "step" in fields} == event_kinds.OF_A_STEP


def test_every_field_of_an_event_is_documented() -> None:
    """docs/events.md lists every field of every kind."""
    page = documented_events()
    missing = {kind: sorted(fields - page[kind]) for kind, fields in emitted().items() if kind in page}
    assert not {kind: fields for kind, fields in missing.items() if fields}


# ---------------------------------------------------------------- errors


def documented_reasons() -> dict[str, tuple[int, str, int]]:
    """Return the reasons of docs/errors.md with number, exception and exit code."""
    page = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([A-Z_]+)` \((\d+)\) \| `(\w+)` \| (\d+) \|", page, re.MULTILINE)
    return {name: (int(number), exception, int(code)) for name, number, exception, code in rows}


def test_every_reason_is_documented_with_its_exception_and_exit_code() -> None:
    """docs/errors.md has each reason once, with the class the client raises and the code a verb ends with."""
    expected = {}
    for name, number in Reason.items():
        error = Error(reason=number, message="x")
        expected[name.removeprefix("REASON_")] = (
            int(number),
            type(from_wire(error)).__name__,
            int(code_of(DaemonError(error))),
        )
    assert documented_reasons() == expected


def test_every_exit_code_is_documented() -> None:
    """The table of exit codes in docs/errors.md has each number of the code."""
    page = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
    assert {int(code) for code in ExitCode} <= {int(code) for code in re.findall(r"^\| (\d+) \| ", page, re.MULTILINE)}


@cache
def texts_of_the_code() -> tuple[str, ...]:
    """Return every text and every fixed part of an f-string in the packages."""
    files = (path for folder in ("client", "daemon", "storage_backends") for path in (ROOT / folder).rglob("*.py"))
    return tuple(
        node.value
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def test_quoted_messages_are_those_of_the_code() -> None:
    """Each message that docs/troubleshooting.md quotes stands in the code, but for the parts that vary."""
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    quoted = [
        text for line in re.findall(r"^\*\*(.*)\*\*", page, re.MULTILINE) for text in re.findall(r"`([^`]+)`", line)
    ]
    parts = [part for text in quoted if " " in text for part in text.split("…") if len(part.strip()) > 3]
    assert len(parts) > 20
    assert not [part for part in parts if not any(part.strip() in text for text in texts_of_the_code())]


# ---------------------------------------------------------------- protocol

_ELEMENT = re.compile(
    r"(message|enum|service|rpc)\s+\w+|((optional|repeated)\s+)?(map<[^>]+>|[\w.]+)\s+\w+\s*=\s*\d+|\w+\s*=\s*\d+\s*;"
)


def uncommented(text: str) -> list[str]:
    """Return the messages, fields, values, services and RPCs of a .proto that no comment stands above."""
    bare, before = [], ""
    for line in map(str.strip, text.splitlines()):
        is_element = _ELEMENT.match(line) and not line.startswith(("syntax", "package", "import", "option "))
        if is_element and not before.startswith("//") and "//" not in line:
            bare.append(line)
        before = line
    return bare


@pytest.mark.parametrize("file", PROTOS, ids=named)
def test_everything_in_a_proto_file_is_commented(file: Path) -> None:
    """Each message, field, enum value, service and RPC has a comment."""
    assert uncommented(file.read_text(encoding="utf-8")) == []


def test_a_missing_comment_is_noticed() -> None:
    """The check of comments sees fields of every kind, enum values and RPCs."""
    text = "message A {\n  // Good.\n  uint32 a = 1;\n  repeated B b = 2;\n  map<string, C> c = 3;\n}\nenum D {\n  E = 0;\n}\n"
    assert uncommented(text) == ["message A {", "repeated B b = 2;", "map<string, C> c = 3;", "enum D {", "E = 0;"]
