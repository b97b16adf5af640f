"""The harness's end of a proxy: starts it on a leash, commands it, reads what it did.

Owns: the process and its control socket. Invariant: the proxy ends with the harness, also when the harness is killed.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tempfile
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from ckptd.chaos.cluster.process import Leashed, ProcessError
from ckptd.chaos.store_proxy.ledger import read_ledger
from ckptd.chaos.store_proxy.orders import OrderError, to_json
from ckptd.chaos.watch import read_tail, wait_until
from ckptd.storage_backends.fault_script import Fault

_START_DEADLINE = timedelta(seconds=30)
_ANSWER_DEADLINE = timedelta(seconds=10)
_END_GRACE = timedelta(seconds=3)


class StoreProxy:
    """A running proxy. For one thread; a context manager.

    Args:
        store: Base URL of the S3 service behind it.
        folder: Gets `store-faults.jsonl`, a line per fault that was done, and `store-proxy.log`.
        seed: For probabilities and the places of wrong bits.

    Attributes:
        endpoint: Base URL for clients; plain http on the loopback address.
        ledger: The file of what was done.

    Raises:
        ProcessError: It did not start; the message ends with its log.
    """

    def __init__(self, store: str, folder: Path, *, seed: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.ledger = folder / "store-faults.jsonl"
        log = folder / "store-proxy.log"
        # A short path: that of a Unix socket has at most 107 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="ckptd-proxy-"))
        self._control = self._folder / "control"
        options = {"--store": store, "--control": self._control, "--ledger": self.ledger, "--seed": seed}
        command = [sys.executable, "-m", "ckptd.chaos.store_proxy.serve"]
        self._process = Leashed(
            [*command, *(str(part) for option in options.items() for part in option)],
            environment={name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
            stdout=log,
            wipe=[self._folder],
        )
        is_up = wait_until(lambda: self._listens() or self._process.poll() is not None, within=_START_DEADLINE)
        if not is_up or self._process.poll() is not None:
            self.close()
            raise ProcessError(f"the store's proxy did not start:\n{read_tail(log, most=2000)}")
        self.endpoint = f"http://127.0.0.1:{self._command({'do': 'port'})['port']}"

    def add(self, fault: Fault) -> int:
        """Let a fault strike from now on; on return it does. Return the number of this order, as `done` names it.

        Raises:
            OrderError: The proxy refuses it, and says why.
        """
        return int(self._command({"do": "add", "fault": to_json(fault)})["order"])

    def clear(self) -> None:
        """End all faults; on return none strikes."""
        self._command({"do": "clear"})

    def done(self) -> list[dict[str, Any]]:
        """Return what was done so far: `t`, `fault`, `order`, `op`, `key`, `call`, `struck` and what the kind adds."""
        return list(read_ledger(self.ledger))

    def close(self) -> None:
        """End the proxy; idempotent."""
        self._process.terminate(_END_GRACE)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as line, suppress(OSError):
            line.connect(str(self._control))
            return True
        return False

    def _command(self, command: dict[str, object]) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(_ANSWER_DEADLINE.total_seconds())
            line.connect(str(self._control))
            line.sendall(json.dumps(command).encode() + b"\n")
            with line.makefile("rb") as answers:
                answer: dict[str, Any] = json.loads(answers.readline() or b"{}")
        if "error" in answer:
            raise OrderError(answer["error"])
        return answer
