"""`python -m sluice_prefill --spec FILE`: run and watch one prefill engine."""

from __future__ import annotations

import sys

from sluice_engine.supervisor.supervise import main

if __name__ == "__main__":
    sys.exit(main())
