"""`python -m tatami.lab.rank FOLDER SCRIPT.PY ...` (or `-m module ...`): a rank that loads torch before its quota begins.

On a tenth of a core that import alone would take half a minute, and it is no part of what a lab is to show.
"""

from __future__ import annotations

import os
import sys

import torch  # noqa: F401

from tatami.comm import runner
from tatami.lab.enter import join, read


def main() -> None:
    """Become a process of the processor that plays this rank, then run what the command line names."""
    folder, *words = sys.argv[1:]
    join(read(folder, "ranks.json")[int(os.environ["PMI_RANK"])])
    sys.argv[1:] = words
    runner.main()


if __name__ == "__main__":
    main()
