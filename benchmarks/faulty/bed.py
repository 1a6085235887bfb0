"""A lab whose hosts are nodes of Ray, on which the same training runs under MPI and elastic."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from elsewhere import of_ranks
from faulty.judging import Mark, marks_of
from faulty.training import Training
from ray_nodes import address_of, drive, ray_cluster
from tatami.cluster import Cluster
from tatami.errors import LabError
from tatami.lab import Lab
from tatami.lab.lab_state import running_lab

SLACK_S = 300.0
"""For nodes and ranks to start."""


@dataclass(kw_only=True)
class Bed:
    """See `open_bed`."""

    lab: Lab
    log: BinaryIO
    folder: Path
    samples: int
    runs: int = 0

    def training(self, *, steps: int, layout: str | None = None) -> Training:
        """One more run, with a folder of its own."""
        self.runs += 1
        folder = self.folder / f"run-{self.runs}"
        folder.mkdir()
        speeds = self.lab.plan.cluster.plain_speeds("a lab")
        hosts = [each.host for each in self.lab.plan.cluster.processors]
        return Training(
            samples=self.samples,
            steps=steps,
            speeds=dict(zip(hosts, speeds, strict=True)),
            quotas=None,
            layout=layout,
            every_s=None,
            folder=str(folder),
        )

    def under_mpi(self, training: Training, *, limit_s: float) -> list[Mark]:
        """When which step was done."""
        code = self.lab.run(["-m", "faulty.training", training.write()], environment=of_ranks(), timeout_s=limit_s + SLACK_S)
        if code != 0:
            raise LabError(f"the ranks under MPI ended with exit code {code}; what they said is above")
        return marks_of((training.path / "marks").read_text())

    def elastic(self, training: Training, *, ranks: int, limit_s: float) -> list[Mark]:
        """When which step was done; ranks come under the quotas of their hosts when they have loaded torch."""
        files = {host: running_lab(host, name=self.lab.name).host_file(host) for host in training.speeds}
        quotas = {host: json.loads(Path(file).read_text())["groups"]["first"] for host, file in files.items()}
        file = replace(training, quotas=quotas).write()
        words = [sys.executable, "-m", "faulty.leading", file, str(ranks), address_of(self.lab)]
        drive(self.lab, words, log=self.log, timeout_s=limit_s + SLACK_S, environment=of_ranks())
        return marks_of((training.path / "marks").read_text())


@contextmanager
def open_bed(cluster: Cluster, *, folder: Path, samples: int) -> Iterator[Bed]:
    """A lab of `cluster`, with one processor on each host; what runs leave is kept in `folder`."""
    with Lab(cluster) as lab, ray_cluster(lab, folder=folder, environment=of_ranks()) as log:
        yield Bed(lab=lab, log=log, folder=folder, samples=samples)
