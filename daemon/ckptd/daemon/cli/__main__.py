"""`python -m ckptd.daemon.cli`: the console script where it is not on PATH."""

import sys

from ckptd.daemon.cli import main

if __name__ == "__main__":
    sys.exit(main())
