"""What is installed may still not work: each thing is tried once, in a process of its own and within a limit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tatami.doctor.diagnosis import Diagnosis
from tatami.doctor.host_facts import HostFacts
from tatami.errors import shortened

LIMIT_S = 120.0
_LIBRARY = "MPI library"
_LOAD = """
import mpi4py
mpi4py.rc.initialize = False
try:
    from mpi4py import MPI
    print("loaded", mpi4py.__version__)
except (ImportError, RuntimeError) as error:
    print(type(error).__name__ + ":", *str(error).split())
"""
_SUM = """
from mpi4py import MPI
total = MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank + 1)
if MPI.COMM_WORLD.rank == 0:
    print("sum", total, MPI.Get_library_version().split(chr(10))[0].split(",")[0])
"""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Something to try.

    Attributes:
        what: it is called.
        needs: the package that must be there for it.
        words: the program and its arguments.
        expects: how the line of its output begins that says that it works.
        advice: what to do where it does not.
    """

    what: str
    needs: str
    words: tuple[str, ...]
    expects: str
    advice: str


TRIALS = (
    Trial(
        what=_LIBRARY,
        needs="mpi4py",
        words=("-c", _LOAD),
        expects="loaded ",
        advice="mpi4py is installed, but the MPI library does not load: pip install mpich",
    ),
    Trial(
        what="MPI, two ranks",
        needs="mpi4py",
        words=("-m", "tatami", "run", "-n", "2", sys.executable, "-c", _SUM),
        expects="sum 3 ",
        advice="two ranks of this machine cannot add two numbers, so `tatami run` will not work either; `mpiexec` of another "
        "MPI library on the PATH is the usual reason: pip install --force-reinstall mpi4py mpich",
    ),
    Trial(
        what="CUDA in torch",
        needs="torch",
        words=("-c", "import torch; print('cuda', torch.cuda.is_available(), torch.version.cuda)"),
        expects="cuda True ",
        advice="this torch sees no GPU although the driver shows some: install a torch that was built for its CUDA",
    ),
    Trial(
        what="Ray",
        needs="ray",
        words=("-c", "import ray; print('Ray', ray.__version__)"),
        expects="Ray ",
        advice="pip install --force-reinstall ray",
    ),
)


def tried(facts: HostFacts, *, trials: Sequence[Trial] = TRIALS, limit_s: float = LIMIT_S) -> list[Diagnosis]:
    """Try what is installed here.

    Args:
        facts: of this host.
        trials: what to try.
        limit_s: for each.
    """
    wanted = [trial for trial in trials if trial.needs in facts.packages and (trial.what != "CUDA in torch" or facts.gpus)]
    found: list[Diagnosis] = []
    for trial in wanted:
        if trial.needs != "mpi4py" or not any(each.what == _LIBRARY and each.is_problem for each in found):
            found.append(_try(trial, limit_s=limit_s))
    return found


def _try(trial: Trial, *, limit_s: float) -> Diagnosis:
    try:
        done = subprocess.run(
            [sys.executable, *trial.words], capture_output=True, text=True, errors="replace", timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return Diagnosis(what=trial.what, seen=f"no answer in {limit_s:g} s", is_problem=True, advice=trial.advice)
    for line in done.stdout.splitlines():
        if line.startswith(trial.expects):
            return Diagnosis(what=trial.what, seen=f"works ({line})")
    said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    seen = shortened(said[-1]) if said else f"ended with exit code {done.returncode}"
    return Diagnosis(what=trial.what, seen=seen, is_problem=True, advice=trial.advice)
