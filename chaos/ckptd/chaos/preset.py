"""Presets as values: which scenarios, on how many nodes and ranks; read from TOML.

Owns: the form of a preset file. Does not own: running one (`preset_run`). Invariant: a preset that was read names only
scenarios that exist.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from ckptd.chaos.cluster.store import STORES
from ckptd.chaos.scenario import Scenario
from ckptd.chaos.scenario_reader import ScenarioError, load, read_text

_KEYS = ("title", "nodes", "ranks", "store", "timeout_s", "every_save", "scenarios")


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A preset file.

    Attributes:
        name: Name of the file without ".toml"; its path, where it is a file of one's own.
        title: One line: what happens.
        scenarios: In the order they are done.
        nodes: Nodes, where the command says no other number.
        ranks: Ranks on each, likewise.
        store: "local" or "s3", likewise.
        timeout_s: Bound of each run, seconds, likewise.
        every_save: A save waits for a slot instead of being skipped (CKPTD_WAIT_WHEN_BUSY).
    """

    name: str
    title: str
    scenarios: tuple[Scenario, ...]
    nodes: int = 1
    ranks: int = 2
    store: str = "local"
    timeout_s: int = 600
    every_save: bool = False

    def environment(self) -> dict[str, str]:
        """Return the variables of the ranks that it sets."""
        return {"CKPTD_WAIT_WHEN_BUSY": "1"} if self.every_save else {}


def preset_names() -> list[str]:
    """Return the names of the presets of the package, sorted."""
    folder = resources.files("ckptd.chaos.presets")
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_preset(name: str) -> Preset:
    """Return the preset of the package by name, or read the file where `name` is a path that ends in .toml.

    Raises:
        ScenarioError: There is none, or it is wrong; the text says what is allowed.
    """
    if name.endswith(".toml"):
        if not Path(name).is_file():
            raise ScenarioError(f"there is no preset file {name}")
        return parse_preset(read_text(Path(name)), name=name)
    if name not in preset_names():
        raise ScenarioError(f"there is no preset {name!r}; there are: {', '.join(preset_names())}, or a .toml file")
    text = (resources.files("ckptd.chaos.presets") / f"{name}.toml").read_text(encoding="utf-8")
    return parse_preset(text, name=name)


def parse_preset(text: str, *, name: str) -> Preset:
    """Return the preset that `text` describes; a scenario's file lies relative to the working folder.

    Raises:
        ScenarioError: Names the preset, the key, and what is allowed.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(f"preset {name}: {error}") from None
    if strange := [key for key in table if key not in _KEYS]:
        raise ScenarioError(f"preset {name}: unknown key {strange[0]!r}; allowed: {', '.join(_KEYS)}")
    names = table.get("scenarios")
    if not isinstance(names, list) or not names or not all(isinstance(one, str) for one in names):
        raise ScenarioError(f"preset {name}: scenarios is a list of names or .toml files, not {names!r}")
    if twice := [one for one in names if names.count(one) > 1]:
        raise ScenarioError(f"preset {name}: scenario {twice[0]!r} is there twice")
    store = table.get("store", "local")
    if store not in STORES:
        raise ScenarioError(f"preset {name}: store is {store!r}; allowed: {', '.join(STORES)}")
    every_save = table.get("every_save", False)
    if not isinstance(every_save, bool):
        raise ScenarioError(f"preset {name}: every_save is true or false, not {every_save!r}")
    title = table.get("title", name)
    if not isinstance(title, str):
        raise ScenarioError(f"preset {name}: title is a text, not {title!r}")
    return Preset(
        name=name,
        title=title,
        scenarios=tuple(load(one) for one in names),
        nodes=_number(table, "nodes", 1, name),
        ranks=_number(table, "ranks", 2, name),
        store=store,
        timeout_s=_number(table, "timeout_s", 600, name),
        every_save=every_save,
    )


def _number(table: Mapping[str, object], key: str, otherwise: int, name: str) -> int:
    value = table.get(key, otherwise)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ScenarioError(f"preset {name}: {key} is a whole number from 1, not {value!r}")
    return value
