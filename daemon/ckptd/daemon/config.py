"""Settings of the agent: defaults, one TOML file, CKPTD_* variables, flags; the later ones win.

Owns: every setting with its unit, range and default, and where each value came from. It is the only module of
the daemon that reads the environment (failpoints aside). Unknown keys and values out of range are refused with key, value
and range.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from ckptd.daemon.errors import DaemonError
from ckptd.protos import error_pb2
from ckptd.protos.setting_ranges import allowed

Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600)]


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


def default_shm_dir() -> Path:
    """Return where slots lie by default: Linux's shared memory; elsewhere a folder of files that are mapped."""
    parent = Path("/dev/shm") if sys.platform.startswith("linux") else Path(tempfile.gettempdir())  # noqa: S108 - checked
    return parent / f"ckptd-{_user()}{'' if sys.platform.startswith('linux') else '-shm'}"


def default_run_dir() -> Path:
    """Return where the socket stands by default: short, private to the user, gone at reboot."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "ckptd" if runtime else Path(f"/tmp/ckptd-{_user()}")  # noqa: S108 - made 0700, checked


class AgentConfig(BaseSettings):
    """Settings of one agent. Frozen; every field names its unit in its description."""

    model_config = SettingsConfigDict(env_prefix="CKPTD_", frozen=True, extra="forbid", validate_default=True)

    run_dir: Path = Field(
        default_factory=default_run_dir, description="Folder of the socket agent.sock and of agent.json."
    )
    data_dir: Path = Field(
        default_factory=lambda: Path.home() / ".local/share/ckptd",
        description="Folder that gives the node its identity (node-id); must survive a restart of the agent.",
    )
    shm_dir: Path = Field(
        default_factory=default_shm_dir,
        description="Folder of the slots, on tmpfs; must survive a restart of the agent.",
    )
    listen: str = Field("127.0.0.1", min_length=1, description="Address that coordinators of this agent listen on.")
    port: int = Field(0, ge=0, le=65535, description="Port of the first coordinator; 0 takes any.")
    advertise: str = Field("", description="Host name other nodes reach this one at; empty: the address of `listen`.")
    insecure: bool = Field(False, description="Allow listening beyond loopback without an explicit address.")
    event_log: Path | None = Field(None, description="File of the event log, JSON lines; empty: none.")
    roots: tuple[str, ...] = Field((), description="URL prefixes of roots this agent serves; empty: any of its user's.")
    hash_threads: int = Field(2, ge=1, le=64, description="Threads that hash a snapshot.")
    put_concurrency: int = Field(
        0, ge=0, le=256, description="Requests in flight to the store; 0: what the store says."
    )
    verify_puts: bool = Field(True, description="HEAD every chunk after its put, before the index is written.")
    restore_window_bytes: int = Field(
        256 << 20,
        ge=128 << 20,
        le=1 << 40,
        description="Memory that a restore may take on a node beside what its ranks want, per job.",
    )
    store_deadline_s: Seconds = Field(60.0, description="Seconds one store operation may be retried.")
    node_grace_s: Seconds = Field(60.0, description="Seconds a node may be away before its ranks count as lost.")
    reattach_s: Seconds = Field(
        10.0, description="Seconds a living rank may be without its stream before it counts as lost."
    )
    drain_s: float = Field(30.0, ge=0, le=24 * 3600, description="Seconds that running uploads get after SIGTERM.")
    idle_exit_s: float = Field(
        0.0,
        ge=0,
        le=7 * 24 * 3600,
        description="Seconds without ranks and uploads after which the agent ends; 0: never.",
    )

    @field_validator("run_dir", "data_dir", "shm_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        if not value.is_absolute():
            raise ValueError("must be an absolute path")
        return value

    @field_validator("roots")
    @classmethod
    def _roots_are_prefixes(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(root.strip("/") for root in value):
            raise ValueError("an empty prefix would allow every local folder")
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take arguments alone: `load_config` merges file, environment and flags, so that origins are known."""
        del settings_cls, env_settings, dotenv_settings, file_secret_settings
        return (init_settings,)


def load_config(
    flags: Mapping[str, Any], *, file: Path | None = None, environment: Mapping[str, str] | None = None
) -> tuple[AgentConfig, dict[str, str]]:
    """Return the settings, and for each key where its value came from.

    Args:
        flags: values given on the command line; None means not given.
        file: TOML file, or None.
        environment: default: the process's.

    Raises:
        DaemonError: INVALID_ARGUMENT; one sentence per wrong key: key, value, origin, allowed range.
    """
    variables = os.environ if environment is None else environment
    values: dict[str, Any] = {}
    origins = dict.fromkeys(AgentConfig.model_fields, "default")
    if file is not None:
        values.update(_from_file(file))
        origins.update(dict.fromkeys(values, str(file)))
    for key in AgentConfig.model_fields:
        name = f"CKPTD_{key.upper()}"
        if variables.get(name):
            values[key] = tuple(variables[name].split(",")) if key == "roots" else variables[name]
            origins[key] = name
    for key, value in flags.items():
        if value is not None and value != ():
            values[key] = value
            origins[key] = f"--{key.replace('_', '-')}"
    try:
        return AgentConfig(**values), {key: origins[key] for key in AgentConfig.model_fields}
    except ValidationError as wrong:
        parts = []
        for entry in wrong.errors():
            key = str(entry["loc"][0]) if entry["loc"] else "?"
            text = "unknown key" if entry["type"] == "extra_forbidden" else entry["msg"]
            field = AgentConfig.model_fields.get(key)
            span = allowed(field.metadata) if field is not None else ""
            text = f"{text} (allowed: {span})" if span else text
            parts.append(f"{key} = {entry['input']!r} (from {origins.get(key, '?')}): {text}")
        raise DaemonError.of(
            "; ".join(parts),
            reason=error_pb2.REASON_INVALID_ARGUMENT,
            hint="`ckptd agent --print-config` shows every key with its meaning",
        ) from None


def _from_file(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            return tomllib.load(opened)
    except OSError as failure:
        raise DaemonError.of(
            f"configuration file {file} cannot be read: {failure.strerror}",
            reason=error_pb2.REASON_INVALID_ARGUMENT,
            object=str(file),
        ) from failure
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as failure:
        raise DaemonError.of(
            f"configuration file {file} is not TOML: {failure}",
            reason=error_pb2.REASON_INVALID_ARGUMENT,
            object=str(file),
        ) from failure


def printed(config: AgentConfig, origins: Mapping[str, str]) -> str:
    """Return the settings as TOML, each with its origin and meaning as a comment."""
    lines = []
    for key, field in AgentConfig.model_fields.items():
        value = getattr(config, key)
        lines.append(f"# {field.description}  [{origins[key]}]")
        lines.append(f"{'# ' if value is None else ''}{key} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    # JSON's strings are TOML's but for one character, as long as letters are not written as pairs of surrogates.
    return json.dumps("" if value is None else str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
