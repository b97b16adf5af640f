"""The rendezvous that the harness hosts: a torch store that outlives every launch.

Owns: one TCP store on a free port. Run as a process of its own (`python -m ckptd.chaos.cluster.rendezvous PORT_FILE`),
because the harness itself does without torch. Ends when killed.
"""

from __future__ import annotations

import sys
import threading
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]


def main(port_file: str) -> None:
    """Open the store, write its port into `port_file` in one step, and wait for the end."""
    store = TCPStore("127.0.0.1", 0, None, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False)
    draft = Path(port_file + ".draft")
    draft.write_text(str(store.port))
    draft.rename(port_file)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1])
