"""Runs a job of the evaluation in a lab of its own, and hands back what its ranks recorded."""

from __future__ import annotations

import json
import os
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from elsewhere import of_ranks
from paper.setting import EvaluationJob
from tatami.errors import LabError
from tatami.lab import Lab

_RANK = "paper.rank"
_PRELOAD = ("paper.measuring",)
_POLL_S = 0.01


def run_job(job: EvaluationJob, *, cores: float | None = None, timeout_s: float = 900.0) -> list[dict[str, Any]]:
    """The records of one job, each with the lab's scale and the wall time of the whole job.

    Args:
        job: what to measure.
        cores: of this machine, for the lab; all where None.
        timeout_s: after which the job is stopped.

    Raises:
        LabError: this machine cannot be a lab, or the job failed.
    """
    with tempfile.TemporaryDirectory(prefix="tatami-evaluation-") as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="latency is not emulated")  # said in the records' document
        description, records = Path(folder) / "job.json", Path(folder) / "records.jsonl"
        description.write_text(json.dumps(job.to_dict()), encoding="utf-8")
        with Lab(job.cluster, cores=cores) as lab:
            start_s = time.monotonic()
            running = lab.start(
                ["-m", _RANK, str(description), str(records)],
                environment={**of_ranks(preload=_PRELOAD), "GLOO_SOCKET_IFNAME": "eth0"},
            )
            try:
                while (code := running.poll()) is None:
                    if time.monotonic() > start_s + timeout_s:
                        raise LabError(f"{_describe(job)} did not end within {timeout_s:g} s")
                    _serve(lab, records.with_suffix(".ask"))
                    time.sleep(_POLL_S)
            except BaseException:
                running.stop()
                raise
            if code != 0:
                raise LabError(f"{_describe(job)} ended with exit code {code}; what its ranks said is above")
            job_s = time.monotonic() - start_s
            scale, quotas = lab.plan.scale, list(lab.plan.quotas)
        lines = records.read_text(encoding="utf-8").splitlines()
        load = os.getloadavg()[0]
        return [
            {**json.loads(line), "quotas_cores": quotas, "scale_cores": scale, "job_s": job_s, "load": load} for line in lines
        ]


def _serve(lab: Lab, ask: Path) -> None:
    """Do what the ranks ask of the lab: another speed for a host."""
    if ask.exists():
        host, speed = ask.read_text(encoding="utf-8").split()
        lab.set_speed(host, float(speed))
        ask.unlink()


def _describe(job: EvaluationJob) -> str:
    return f"the job of part {job.part!r} ({job.net}, condition {job.condition}, N = {job.num})"
