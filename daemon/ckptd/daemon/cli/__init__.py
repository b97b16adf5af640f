"""The console script `ckptd`: finds a verb, runs it, and turns what went wrong into one line and an exit code.

Owns: the list of verbs and the outermost error handler. Does not own: any verb; they come from the entry-point group
`ckptd.commands`, loaded when they are called, so that daemon, client and chaos each bring their own and `ckptd ls` never
waits for torch. Invariant: data goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import difflib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points, version
from typing import Protocol, runtime_checkable

import typer
import typer.main

from ckptd.daemon.cli.exit_codes import ExitCode, code_of
from ckptd.daemon.cli.summaries import summary
from ckptd.daemon.errors import DaemonError
from ckptd.protos.error_pb2 import Error
from ckptd.storage_backends.errors import StorageError

GROUP = "ckptd.commands"
# Typer brings its own copy of click since 0.20; this is the usage error of whichever copy it uses.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


@runtime_checkable
class _OnTheWire(Protocol):
    """An error of a package that is not known here, of the client say, which has the form of this project's errors."""

    def to_wire(self) -> Error:
        """Return reason, message, hint and the rest."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `ckptd VERB ...` and return its exit code, see docs/cli.md.

    Args:
        arguments: Without the program's name; None takes the process's own.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    verbs = {point.name: point for point in entry_points(group=GROUP)}
    if given[:1] in (["--version"], ["-V"]):
        typer.echo(f"ckptd {version('ckptd')}")
        return ExitCode.GOOD
    if not given or given[0] in {"--help", "-h"}:
        typer.echo(_help(verbs), err=not given)
        return ExitCode.USAGE if not given else ExitCode.GOOD
    verb = given[0]
    if verb not in verbs:
        near = difflib.get_close_matches(verb, verbs, n=1)
        hint = f"did you mean `ckptd {near[0]}`?" if near else "see `ckptd --help`"
        return _fail("ckptd", f"there is no verb {verb!r} ({hint})", ExitCode.USAGE)
    return _run(verb, verbs[verb], given[1:])


def _run(verb: str, point: EntryPoint, arguments: list[str]) -> int:
    name = f"ckptd {verb}"
    try:
        result = _command(verb, point.load())(arguments, name)
    except DaemonError as error:
        return _fail(name, str(error), code_of(error))
    except StorageError as error:
        return _fail(name, str(error), code_of(error))
    except _UsageError as error:
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        return _fail(name, f"{message} (see `{name} --help`)", ExitCode.USAGE)
    except (KeyboardInterrupt, typer.Abort):
        return 130  # as a shell counts SIGINT
    except BrokenPipeError:
        # The reader has seen enough. Python would complain once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.GOOD
    except Exception as error:
        if isinstance(error, _OnTheWire):
            told = DaemonError(error.to_wire())
            return _fail(name, str(told), code_of(told))
        traceback.print_exc()
        return _fail(name, f"unexpected {type(error).__name__}: {error}", ExitCode.UNEXPECTED)
    return result if isinstance(result, int) else ExitCode.GOOD


def _command(verb: str, target: object) -> Callable[[list[str], str], object]:
    """Return how to run what an entry point names: a Typer app, or a command function."""
    if isinstance(target, typer.Typer):
        app = target
    else:
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(verb)(target)  # type: ignore[type-var]
    command = typer.main.get_command(app)

    def run(arguments: list[str], name: str) -> object:
        # Without standalone mode, Exit comes back as a number and errors come as exceptions.
        return command.main(args=arguments, prog_name=name, standalone_mode=False)

    return run


def _help(verbs: dict[str, EntryPoint]) -> str:
    width = max(map(len, verbs), default=0)
    lines = [f"  {name:<{width}}  {summary(point.module)}".rstrip() for name, point in sorted(verbs.items())]
    return "\n".join(
        [
            "Usage: ckptd VERB [ARGUMENTS] [OPTIONS]",
            "",
            "Keeps a distributed training job's state safe and brings it back bit for bit.",
            "",
            *(lines or ["  (no verbs: install ckptd again, its entry points are missing)"]),
            "",
            "`ckptd VERB --help` says more; `ckptd --version` the version.",
        ]
    )


def _fail(name: str, text: str, code: int) -> int:
    typer.echo(f"{name}: {' '.join(text.split())}", err=True)
    return code
