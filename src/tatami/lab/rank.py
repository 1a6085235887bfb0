"""`python -m tatami.lab.rank FOLDER SCRIPT.PY ...` (or `-m module ...`): a rank that loads torch before its quota begins.

On a tenth of a core that import alone would take half a minute, and it is not part of what a lab measures.
`TATAMI_LAB_PRELOAD` names more modules, with commas between, to be loaded before: the first step of an optimizer loads
torch._dynamo, for one.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path

import torch  # noqa: F401

from tatami.comm.program import run_program
from tatami.lab.enter import join, read
from tatami.lab.lab_state import pace_file
from tatami.lab.pacing import Pacing

PRELOAD_VARIABLE = "TATAMI_LAB_PRELOAD"


def main() -> None:
    """Become a process of the processor that plays this rank, then run what the command line names."""
    folder, *words = sys.argv[1:]
    for name in filter(None, os.environ.get(PRELOAD_VARIABLE, "").split(",")):
        import_module(name)
    rank = int(os.environ["PMI_RANK"])
    join(read(folder, "ranks.json")[rank])
    file = pace_file(Path(folder), rank)
    if not file.exists():
        run_program(words)
        return
    pacing = Pacing(file)
    try:
        with pacing:
            run_program(words)
    finally:
        pacing.tell(rank)


if __name__ == "__main__":
    main()
