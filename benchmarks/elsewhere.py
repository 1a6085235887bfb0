"""What processes that a benchmark starts in a lab need to know of: the packages of this folder, and how to keep memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tatami.lab.rank import PRELOAD_VARIABLE

HERE = Path(__file__).parent
_KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(8 << 30)}
"""The C library gives blocks over 32 MiB back at once and gets them again, page by page, in every iteration. Only serial runs
and large tiles alone have such blocks: they would take half as long again as the same work in tiles, and every gamma would be
too good."""
_PRELOAD = ("torch._dynamo", "torch.distributed", "numpy", "tatami.train")
"""What ranks would otherwise load under their quotas: half a minute on a tenth of a core."""


def python_path() -> dict[str, str]:
    """The variable with which `python -m paper.rank` and `python -m rehearsal.rank` find their packages, from any folder."""
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(HERE), before] if before else [str(HERE)])}


def of_ranks(*, preload: Sequence[str] = ()) -> dict[str, str]:
    """The environment of the ranks of a lab; `preload` names the modules that they load before their quotas begin, too."""
    return {**python_path(), **_KEEP_MEMORY, PRELOAD_VARIABLE: ",".join([*_PRELOAD, *preload])}
