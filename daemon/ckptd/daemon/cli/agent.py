"""`ckptd agent`: run the agent of this node."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckptd.daemon import serve
from ckptd.daemon.config import load_config, printed


def agent(
    *,
    config: Annotated[Path | None, typer.Option(help="TOML file with settings.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder of the socket and of agent.json.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder that gives the node its identity.")] = None,
    shm_dir: Annotated[Path | None, typer.Option(help="Folder of the slots, on tmpfs.")] = None,
    listen: Annotated[str | None, typer.Option(help="Address for other agents; default 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the first coordinator; 0 takes any.")] = None,
    advertise: Annotated[str | None, typer.Option(help="Host name other nodes reach this one at.")] = None,
    insecure: Annotated[bool | None, typer.Option("--insecure", help="Allow listening on every interface.")] = None,
    event_log: Annotated[Path | None, typer.Option(help="File of the event log (JSON lines).")] = None,
    root: Annotated[list[str] | None, typer.Option(help="URL prefix of roots to serve; repeat for several.")] = None,
    idle_exit_s: Annotated[float | None, typer.Option(help="End after this many idle seconds; 0: never.")] = None,
    drain_s: Annotated[float | None, typer.Option(help="Seconds running uploads get after SIGTERM.")] = None,
    print_config: Annotated[bool, typer.Option("--print-config", help="Show every setting and its origin.")] = False,
) -> None:
    """Run the agent of this node in the foreground; SIGTERM ends it in order."""
    flags = {
        "run_dir": run_dir,
        "data_dir": data_dir,
        "shm_dir": shm_dir,
        "listen": listen,
        "port": port,
        "advertise": advertise,
        "insecure": insecure,
        "event_log": event_log,
        "roots": tuple(root or ()),
        "idle_exit_s": idle_exit_s,
        "drain_s": drain_s,
    }
    settings, origins = load_config(flags, file=config)
    if print_config:
        typer.echo(printed(settings, origins), nl=False)
        return
    serve.run(settings)
