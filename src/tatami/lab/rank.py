"""`python -m tatami.lab.rank FOLDER SCRIPT.PY ...` (or `-m module ...`): a rank that loads torch before its quota begins.

On a tenth of a core that import alone would take half a minute, and it is not part of what a lab measures.
`TATAMI_LAB_PRELOAD` names more modules, with commas between, to be loaded before: the first step of an optimizer loads
torch._dynamo, for one.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

import torch  # noqa: F401

from tatami.comm import runner
from tatami.lab.enter import join, read

PRELOAD_VARIABLE = "TATAMI_LAB_PRELOAD"


def main() -> None:
    """Become a process of the processor that plays this rank, then run what the command line names."""
    folder, *words = sys.argv[1:]
    for name in filter(None, os.environ.get(PRELOAD_VARIABLE, "").split(",")):
        import_module(name)
    join(read(folder, "ranks.json")[int(os.environ["PMI_RANK"])])
    sys.argv[1:] = words
    runner.main()


if __name__ == "__main__":
    main()
