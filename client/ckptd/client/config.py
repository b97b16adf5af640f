"""Settings of a Checkpointer, and the only code of the client that reads the environment.

Owns: names, ranges and defaults of settings; where the agent's socket lies by default; what a launcher says about the
world. Invariant: a `Config` is frozen; what was given as an argument wins over the `CKPTD_*` variable of the same
name.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Literal, TypedDict

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from ckptd.protos import error_pb2
from ckptd.protos.setting_ranges import allowed

from .errors import InvalidRequest

AuditMode = Literal["warn", "off", "raise"]
HashReplicas = Literal["auto", "host", "in-place"]
Transport = Literal["auto", "shm", "stream"]
StoreDriver = Literal["auto", "obstore", "fsspec"]

MAX_SOCKET_PATH_BYTES = 107
"""What fits into a Unix socket address. Source: unix(7), sun_path."""
_POLICY = re.compile(r"always|first|every:[1-9][0-9]{0,5}")
_SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*://.")


class Config(BaseSettings):
    """All settings. Each is also the variable `CKPTD_<NAME>`; durations in seconds."""

    model_config = SettingsConfigDict(env_prefix="CKPTD_", frozen=True, extra="forbid", env_ignore_empty=True)

    root: str = Field(default="", description="Root URL of the job, e.g. s3://bucket/runs/llama or file:///data/llama.")
    job: str = Field(default="", max_length=128, description="Name of the job; one root holds one job.")
    socket: Path | None = Field(
        default=None,
        description="The agent's Unix socket. Default: agent.sock in run_dir, started if nobody listens there.",
    )
    run_dir: Path | None = Field(
        default=None,
        description="Folder of an embedded agent's socket. Default: $XDG_RUNTIME_DIR/ckptd or /tmp/ckptd-<uid>.",
    )
    embedded: bool = Field(
        default=True,
        description="Start an agent where none listens and no socket was named; it ends by itself when idle.",
    )
    coordinator: str = Field(
        default="",
        description="host:port told to other nodes as the coordinator's, instead of what rank 0's agent says.",
    )
    transport: Transport = Field(
        default="auto", description="How bytes reach the agent: shm, stream, or auto (shm where it works)."
    )
    takeover: bool = Field(default=False, description="Start although another run of the job is visibly alive.")
    read_only: bool = Field(default=False, description="Never claim, never write: restore only.")
    keep_last: int = Field(default=0, ge=0, le=1_000_000, description="The newest N steps stay; 0 keeps all.")
    keep_every: int = Field(
        default=0, ge=0, lt=10**12, description="Steps divisible by N stay; 0 switches the rule off."
    )
    slots: int = Field(default=2, ge=1, le=16, description="Staging slots per rank, each of the size of its state.")
    wait_when_busy: bool = Field(
        default=False, description="When every slot is busy: wait for one (within begin_timeout_s) instead of skipping."
    )
    max_failed_saves: int | None = Field(
        default=None, ge=1, description="So many failed saves in a row make the next save raise. Default: never."
    )
    connect_timeout_s: float = Field(
        default=30.0, gt=0, le=3600, description="The agent must answer (or have been started) within this time."
    )
    attach_timeout_s: float = Field(
        default=180.0, gt=0, le=86400, description="All ranks must have attached within this time."
    )
    begin_timeout_s: float = Field(
        default=120.0, gt=0, le=86400, description="All ranks must have asked to save within this time of the first."
    )
    commit_timeout_s: float = Field(
        default=1800.0, gt=0, le=86400 * 7, description="A staged step must be decided within this time."
    )
    restore_timeout_s: float = Field(
        default=1800.0, gt=0, le=86400 * 7, description="A restore must be done within this time."
    )
    posthumous_timeout_s: float = Field(
        default=120.0, ge=0, le=86400, description="Longest wait for uploads of an older timeline that still run."
    )
    store_driver: StoreDriver = Field(default="auto", description="auto, obstore or fsspec.")
    verify_replicas: str = Field(
        default="always",
        description="When ranks that hold the same box are compared: always, first (once per run, restore and layout), or "
        "every:N saves.",
    )
    hash_replicas: HashReplicas = Field(
        default="auto",
        description="Where replicas are fingerprinted: auto (on the GPU, for tensors there), host (all are brought there), or "
        "in-place (as auto, and tensors on the host by the same torch operations; slower).",
    )
    copy_threads: int = Field(
        default=2, ge=1, le=64, description="Threads that copy large tensors into the slot and fingerprint replicas."
    )
    audit: AuditMode = Field(
        default="warn",
        description="What the first save does with state that may be missing from snapshots: warn, raise, or off.",
    )
    client_event_log: Path | None = Field(
        default=None, description="File that gets one JSON line per event of this rank; off by default."
    )

    @field_validator("root")
    @classmethod
    def _root_is_a_url(cls, root: str) -> str:
        if root and not _SCHEME.match(root):
            raise ValueError(f"{root!r} is no URL; write s3://bucket/prefix or file:///absolute/folder")
        return root

    @field_validator("verify_replicas")
    @classmethod
    def _policy_is_known(cls, policy: str) -> str:
        if not _POLICY.fullmatch(policy):
            raise ValueError(f"{policy!r} is none of always, first, every:N (N from 1 to 999999)")
        return policy

    @field_validator("job")
    @classmethod
    def _job_is_printable(cls, job: str) -> str:
        if not job.isprintable():
            raise ValueError(f"{job!r} holds characters that cannot be printed")
        return job

    @property
    def socket_path(self) -> Path:
        """The agent's socket.

        Raises:
            InvalidRequest: the path does not fit into a socket address.
        """
        path = self.socket if self.socket is not None else self.agent_dir / "agent.sock"
        size = len(os.fsencode(path))
        if size > MAX_SOCKET_PATH_BYTES:
            raise InvalidRequest(
                f"the socket path {path} has {size} bytes; a Unix socket address holds {MAX_SOCKET_PATH_BYTES}",
                hint="set CKPTD_SOCKET (agent: --run-dir) to a shorter path",
                key=str(path),
            )
        return path

    @property
    def agent_dir(self) -> Path:
        """Folder of the embedded agent."""
        if self.run_dir is not None:
            return self.run_dir
        runtime = os.environ.get("XDG_RUNTIME_DIR")
        return Path(runtime) / "ckptd" if runtime else Path(f"/tmp/ckptd-{os.getuid() if hasattr(os, 'getuid') else 0}")  # noqa: S108 - checked

    @property
    def may_start_agent(self) -> bool:
        """Whether an agent is started where none listens."""
        return self.embedded and self.socket is None


class Settings(TypedDict, total=False):
    """Single fields of `Config` as keyword arguments of a Checkpointer."""

    socket: Path | None
    run_dir: Path | None
    embedded: bool
    coordinator: str
    transport: Transport
    takeover: bool
    read_only: bool
    keep_last: int
    keep_every: int
    slots: int
    wait_when_busy: bool
    max_failed_saves: int | None
    connect_timeout_s: float
    attach_timeout_s: float
    begin_timeout_s: float
    commit_timeout_s: float
    restore_timeout_s: float
    posthumous_timeout_s: float
    store_driver: StoreDriver
    verify_replicas: str
    hash_replicas: HashReplicas
    copy_threads: int
    audit: AuditMode
    client_event_log: Path | None


def resolve(config: Config | None, arguments: dict[str, object], *, any_job: bool = False) -> Config:
    """Return the settings: `arguments` over `config`, or over the environment where there is none.

    With `any_job` the job's name may be empty: a reader takes whatever job the root holds.

    Raises:
        InvalidRequest: an unknown field, a value out of range, no root or no job; one error that names all of them.
    """
    try:
        if config is None:
            made = Config(**arguments)  # type: ignore[arg-type] # checked by the model, field by field
        else:
            made = Config(**{**{name: getattr(config, name) for name in Config.model_fields}, **arguments})
    except ValidationError as error:
        problems = [_problem(dict(problem)) for problem in error.errors()]
        bad_root = any(problem["loc"][:1] == ("root",) for problem in error.errors())
        raise InvalidRequest(
            "; ".join(problems),
            reason=error_pb2.REASON_INVALID_ROOT if bad_root else error_pb2.REASON_INVALID_ARGUMENT,
            hint="docs/client.md lists every setting with its range",
        ) from None
    if not made.root:
        raise InvalidRequest(
            "no root was given",
            reason=error_pb2.REASON_INVALID_ROOT,
            hint='pass Checkpointer("s3://bucket/prefix", job=...) or set CKPTD_ROOT',
        )
    if not made.job and not any_job:
        raise InvalidRequest("no job name was given", hint="pass job= or set CKPTD_JOB")
    return made


def _problem(found: dict[str, Any]) -> str:
    """Return key, what is wrong, and for numbers the value and the whole range."""
    key = ".".join(map(str, found["loc"]))
    field = Config.model_fields.get(key)
    span = allowed(field.metadata) if field is not None else ""
    text = f"{key or 'settings'}: {found['msg'].removeprefix('Value error, ')}"
    return f"{text}, not {found['input']!r} (allowed: {span})" if span else text


def launched_world() -> int:
    """Return the world size a launcher announced in the environment, 1 if none did."""
    text = os.environ.get("WORLD_SIZE", "1")
    return int(text) if text.isdigit() else 1
