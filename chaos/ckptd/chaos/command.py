"""What stands behind `--`: a script, a module, or a torchrun command line. Pure.

Owns: taking script and numbers out of torchrun's form, and the right form for all that is refused. Does not own: starting
anything. The harness starts torchrun itself, on every node and with a rendezvous of its own, so that of a torchrun line
only the numbers and the script count. Invariant: nothing is dropped in silence: what the harness decides by itself is named.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

_PYTHON = re.compile(r"(?:python|pypy)[0-9.]*")
_TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_OTHER_LAUNCHERS = (
    *("accelerate", "deepspeed", "horovodrun", "mpirun", "mpiexec", "srun", "sbatch", "composer", "colossalai", "ray"),
    *("bash", "sh", "zsh", "env", "uv", "poetry", "pdm", "conda", "pixi", "sudo", "timeout", "nohup", "docker"),
)
_COUNTS = {"nnodes": "--nnodes", "nproc-per-node": "--nproc"}
# What the harness decides: options with a value, and those without.
_OURS = frozenset(
    {"node-rank", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "master-addr", "master-port", "local-addr"}
    | {"max-restarts", "monitor-interval", "start-method", "role", "log-dir", "redirects", "tee", "numa-binding"}
    | {"local-ranks-filter", "logs-specs", "event-log-handler", "signals-to-handle", "duplicate-stdout-filters"}
    | {"duplicate-stderr-filters", "virtual-local-rank", "shutdown-timeout"}
)
_OUR_FLAGS = frozenset({"standalone", "use-env", "virtual-local-rank"})


class CommandError(ValueError):
    """The command cannot be run by the harness; the text says the right form."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """What torchrun is to run.

    Attributes:
        script: Script or `-m MODULE`, and its arguments.
        nnodes: Nodes that a torchrun line asked for; None where there was none.
        nproc: Ranks on each, likewise.
        left_out: Options of that line that the harness decides by itself.
    """

    script: tuple[str, ...]
    nnodes: int | None = None
    nproc: int | None = None
    left_out: tuple[str, ...] = ()


def parse_command(words: Sequence[str], *, is_file: Callable[[str], bool]) -> Command:
    """Return what is to be run.

    Args:
        words: What stands behind `--`.
        is_file: Whether there is such a file.

    Raises:
        CommandError: Nothing, or something that the harness cannot start; the text says the right form.
    """
    if not words:
        raise CommandError(f"there is no script; the right form: {_form(['train.py', '...'])}")
    head, rest = PurePath(words[0]).name, list(words[1:])
    if head == "torchrun":
        return _torchrun(rest, is_file)
    if _PYTHON.fullmatch(head):
        return _python(words[0], rest, is_file)
    if head in _OTHER_LAUNCHERS and not is_file(words[0]):
        raise CommandError(
            f"{head} cannot be started under the harness, which starts the ranks itself with torchrun on every node; name the "
            f"script alone: {_form(_script_in(rest))}"
        )
    return Command(script=_script(words, is_file))


def _python(python: str, rest: list[str], is_file: Callable[[str], bool]) -> Command:
    if rest[:1] == ["-m"] and rest[1:2] and rest[1] in _TORCHRUN_MODULES:
        if rest[1] == "torch.distributed.launch":
            raise CommandError(f"torch.distributed.launch is no longer used; write {_form(['torchrun', '...'])}")
        return _torchrun(rest[2:], is_file)
    script = rest if rest[:1] == ["-m"] else _script_in(rest)
    raise CommandError(
        f"the harness starts Python itself, once for each rank; leave {python!r} out: {_form(script or ['train.py', '...'])}"
    )


def _torchrun(words: list[str], is_file: Callable[[str], bool]) -> Command:
    found = Command(script=())
    at = 0
    while at < len(words) and words[at].startswith("-"):
        word = words[at]
        at += 1
        if word == "--":
            break
        if word in ("-m", "--module"):
            return replace(found, script=_script(["-m", *words[at:]], is_file))
        name, has_value, value = word.lstrip("-").partition("=")
        name = name.replace("_", "-")
        if name in _OUR_FLAGS:
            found = replace(found, left_out=(*found.left_out, word))
            continue
        if name not in _COUNTS and name not in _OURS and name not in ("r", "t"):
            raise CommandError(f"torchrun's option {word!r} is not known here; {_way_out(words)}")
        if not has_value:
            if at >= len(words):
                raise CommandError(f"torchrun's option {word!r} has no value; {_way_out(words)}")
            value = words[at]
            at += 1
        found = (
            _counted(found, name, word, value) if name in _COUNTS else replace(found, left_out=(*found.left_out, word))
        )
    return replace(found, script=_script(words[at:], is_file))


def _counted(found: Command, name: str, word: str, value: str) -> Command:
    fewest, _, most = value.partition(":")
    if name == "nnodes" and most and fewest == most:
        value = most
    if not value.isdigit() or int(value) < 1:
        hint = "elastic jobs are not" if ":" in value else "counting devices is not"
        raise CommandError(
            f"torchrun's {word} says {value!r}: {hint} supported here; say a number, or {_COUNTS[name]} N before the --"
        )
    return replace(found, nnodes=int(value)) if name == "nnodes" else replace(found, nproc=int(value))


def _script(words: Sequence[str], is_file: Callable[[str], bool]) -> tuple[str, ...]:
    if not words:
        raise CommandError(f"torchrun is given no script; the right form: {_form(['torchrun', 'train.py', '...'])}")
    if words[0] == "-m":
        if len(words) < 2 or not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", words[1]):
            raise CommandError(
                f"-m needs the name of a module; the right form: {_form(['-m', 'package.train', '...'])}"
            )
        return tuple(words)
    if words[0].startswith("-"):
        raise CommandError(f"{words[0]!r} is no script; options of `ckptd chaos run` stand before the --")
    if not is_file(words[0]):
        raise CommandError(f"there is no script {words[0]!r}")
    if PurePath(words[0]).suffix in (".sh", ".bash", ".toml", ".yaml", ".yml"):
        raise CommandError(
            f"{words[0]!r} is no Python script; name the one that it starts: {_form(['train.py', '...'])}"
        )
    return tuple(words)


def _script_in(words: Sequence[str]) -> list[str]:
    """Return what is likely the script of somebody else's command line, with its arguments."""
    at = next((at for at, word in enumerate(words) if word.endswith(".py")), None)
    return ["train.py", "..."] if at is None else list(words[at:])


def _way_out(words: Sequence[str]) -> str:
    return f"name the script alone: {_form(_script_in(words))}"


def _form(script: Sequence[str]) -> str:
    return f"-- {shlex.join(script)}" if "..." not in script else f"-- {' '.join(script)}"


def agreed(option: str, given: int | None, command: int | None, otherwise: int) -> int:
    """Return a number that may be said before the `--` and in a torchrun line.

    Raises:
        CommandError: Both say one, and not the same.
    """
    if given is not None and command is not None and given != command:
        raise CommandError(f"{option} is {given}, but torchrun is told {command}; say it once")
    return next((number for number in (given, command) if number is not None), otherwise)
