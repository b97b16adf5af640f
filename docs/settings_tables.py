"""Writes the tables of docs/configuration.md from the settings models, so that they cannot differ from the code.

python docs/settings_tables.py          rewrites the tables between their markers
python docs/settings_tables.py --check  changes nothing; exits 1 when they are stale

Owns: the tables. Does not own: the settings (`ckptd.daemon.config`, `ckptd.client.config`), nor the text around.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

import annotated_types
import typer
import typer.main
from pydantic.fields import FieldInfo

from ckptd.client.config import Config
from ckptd.daemon.cli.agent import agent
from ckptd.daemon.config import AgentConfig

PAGE = Path(__file__).with_name("configuration.md")
_BOUNDS = ((annotated_types.Ge, "≥ {}", "ge"), (annotated_types.Gt, "> {}", "gt"), (annotated_types.Le, "≤ {}", "le"))
# What a factory makes depends on the machine; here stands the rule. A new factory without an entry is an error.
_MADE = {
    "run_dir": "`$XDG_RUNTIME_DIR/ckptd`, else `/tmp/ckptd-<uid>`",
    "data_dir": "`~/.local/share/ckptd`",
    "shm_dir": "`/dev/shm/ckptd-<uid>`",
}


def agent_table() -> list[str]:
    """Return the rows of the agent's settings: key, flag, default, unit and range, meaning."""
    flags = _flags()
    rows = ["| key | flag | default | unit, range | meaning |", "|---|---|---|---|---|"]
    for key, field in AgentConfig.model_fields.items():
        flag = f"`{flags[key]}`" if key in flags else ""
        rows.append(f"| `{key}` | {flag} | {_default(key, field)} | {_unit(key, field)} | {field.description} |")
    return rows


def client_table() -> list[str]:
    """Return the rows of the client's settings: argument, default, unit and range, meaning."""
    rows = ["| argument | default | unit, range | meaning |", "|---|---|---|---|"]
    for key, field in Config.model_fields.items():
        rows.append(f"| `{key}` | {_default(key, field)} | {_unit(key, field)} | {field.description} |")
    return rows


def page_with_tables(text: str) -> str:
    """Return the page with what stands between its markers replaced.

    Raises:
        ValueError: a marker is missing.
    """
    tables: Mapping[str, list[str]] = {"agent": agent_table(), "client": client_table()}
    for name, rows in tables.items():
        begin, end = f"<!-- settings of the {name}: begin -->", f"<!-- settings of the {name}: end -->"
        before, found_begin, rest = text.partition(begin)
        _, found_end, after = rest.partition(end)
        if not found_begin or not found_end:
            raise ValueError(f"{PAGE.name} lacks {begin if not found_begin else end}")
        text = "\n".join([before + begin, *rows, end + after])
    return text


def _flags() -> dict[str, str]:
    """Return the flag of each setting that has one."""
    app = typer.Typer()
    app.command()(agent)
    found = {}
    for option in typer.main.get_command(app).params:
        name = str(option.name)
        if name in {*AgentConfig.model_fields, "root"}:
            found["roots" if name == "root" else name] = option.opts[0]
    return found


def _default(key: str, field: FieldInfo) -> str:
    if field.default_factory is not None:
        return _MADE[key]
    value = field.default
    if value is None or value in ("", ()):
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _unit(key: str, field: FieldInfo) -> str:
    kind = _plain(field.annotation)
    if get_origin(kind) is Literal:
        return " · ".join(f"`{choice}`" for choice in get_args(kind))
    unit = "s" if key.endswith("_s") else {bool: "true, false", int: "number", float: "number"}.get(kind, "")
    if kind is Path:
        unit = "path"
    elif not unit:
        unit = "texts" if get_origin(kind) is tuple else "text"
    return ", ".join([unit, *_bounds(field)])


def _plain(kind: Any) -> Any:
    """Return the type without `| None`."""
    if get_origin(kind) is UnionType:
        return next(one for one in get_args(kind) if one is not NoneType)
    return kind


def _bounds(field: FieldInfo) -> list[str]:
    found = [
        text.format(_number(getattr(one, name)))
        for kind, text, name in _BOUNDS
        for one in field.metadata
        if isinstance(one, kind)
    ]
    found += [f"< {_number(one.lt)}" for one in field.metadata if isinstance(one, annotated_types.Lt)]
    return found + [
        f"≤ {one.max_length} characters" for one in field.metadata if isinstance(one, annotated_types.MaxLen)
    ]


def _number(value: Any) -> str:
    return f"{value:,}".replace(",", " ")


def main() -> int:
    """Rewrite the page, or say that it is stale."""
    text = PAGE.read_text(encoding="utf-8")
    made = page_with_tables(text)
    if "--check" in sys.argv[1:]:
        return 0 if made == text else 1
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
