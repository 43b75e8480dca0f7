"""Entry point of `python -m ddpcheck`."""

from __future__ import annotations

import sys

from ddpcheck.cli import main

if __name__ == "__main__":
    sys.exit(main())
