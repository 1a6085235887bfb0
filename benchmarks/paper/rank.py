"""One rank of a job of the evaluation: `python -m paper.rank JOB.json RECORDS.jsonl`, which `paper.lab` calls."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed

from paper.measuring import Measuring
from paper.setting import job_from_dict
from tatami.comm.detect import init

_TIMEOUT_S = 180.0


def main() -> None:
    """From beginning to end."""
    job = job_from_dict(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    comm = init(timeout_s=_TIMEOUT_S)
    Measuring(job, comm, records=Path(sys.argv[2])).run()
    comm.barrier()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
