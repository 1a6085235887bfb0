"""Runs a job of the evaluation in a lab of its own, and hands back what its ranks recorded."""

from __future__ import annotations

import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

from elsewhere import of_ranks
from paper.setting import EvaluationJob
from tatami.errors import LabError
from tatami.lab import Lab

_RANK = "paper.rank"
_PRELOAD = ("paper.measuring",)
_POLL_S = 0.01


def run_job(
    job: EvaluationJob,
    *,
    cores: float | None = None,
    timeout_s: float = 900.0,
    told: Callable[[dict[str, Any]], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """The records of one job, each with the lab's scale and the wall time of the whole job.

    Args:
        job: what to measure.
        cores: of this machine, for the lab; all where None.
        timeout_s: after which the job is stopped.
        told: called with each record as soon as it is there, without the wall time.

    Raises:
        LabError: this machine cannot be a lab, or the job failed.
    """
    with tempfile.TemporaryDirectory(prefix="tatami-evaluation-") as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="latency is not emulated")  # said in the records' document
        description, records = Path(folder) / "job.json", Path(folder) / "records.jsonl"
        description.write_text(json.dumps(job.to_dict()), encoding="utf-8")
        added = _AddedLines(records)
        found: list[dict[str, Any]] = []
        with Lab(job.cluster, cores=cores, paced=job.paced is not None, balance=job.balance) as lab:
            facts = {"quotas_cores": list(lab.plan.quotas), "scale_cores": lab.plan.scale}

            def hear() -> None:
                for line in added.read():
                    found.append({**json.loads(line), **facts, "load": os.getloadavg()[0]})
                    told(found[-1])

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
                    hear()
                    time.sleep(_POLL_S)
            except BaseException:
                running.stop()
                raise
            if code != 0:
                raise LabError(f"{_describe(job)} ended with exit code {code}; what its ranks said is above")
            hear()
            job_s = time.monotonic() - start_s
        return [{**record, "job_s": job_s} for record in found]


@final
class _AddedLines:
    """What was added to a file since it was last read, in whole lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = 0

    def read(self) -> list[str]:
        if not self._path.exists() or self._path.stat().st_size == self._read_bytes:
            return []
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            whole, end, _ = file.read().rpartition(b"\n")
        self._read_bytes += len(whole) + len(end)
        return whole.decode("utf-8").splitlines()


def _serve(lab: Lab, ask: Path) -> None:
    """Do what the ranks ask of the lab: another speed for a host."""
    if ask.exists():
        host, speed = ask.read_text(encoding="utf-8").split()
        lab.set_speed(host, float(speed))
        ask.unlink()


def _describe(job: EvaluationJob) -> str:
    return f"the job of part {job.part!r} ({job.net}, condition {job.condition}, N = {job.num})"
