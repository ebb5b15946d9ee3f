"""`python -m aserve`, and the entry point of the installed `aserve` command."""

from __future__ import annotations

import sys

from aserve.cli import main

if __name__ == "__main__":
    sys.exit(main())
