"""`python tests/parts.py 3/8`: the files of a part of the tests; of the last part none, which is what several processes run.

Parts take about as long as each other, by what the files took when they were last looked at. The same numbers tell `pytest -n`
what to begin with.
"""

import heapq
import sys
from pathlib import Path

HERE = Path(__file__).parent
OTHERS_S = 5.0
COSTS_S = {
    "test_stages_zoo.py": 310.0,
    "test_tiled_networks.py": 265.0,
    "test_elastic_runs.py": 190.0,
    "test_examples.py": 185.0,
    "test_tiled_gradients.py": 165.0,
    "test_comm_launch.py": 125.0,
    "test_tiled_odd_networks.py": 125.0,
    "test_server_runtime.py": 120.0,
    "test_tiled_trust.py": 110.0,
    "test_tiled_own_checkpoints.py": 100.0,
    "test_cli_fuzz.py": 95.0,
    "test_server_chaos.py": 95.0,
    "test_documents.py": 90.0,
    "test_tiled_huggingface.py": 90.0,
    "test_tiling_memory.py": 75.0,
    "test_cli_train.py": 70.0,
    "test_tiled_memory.py": 70.0,
    "test_cli_plan.py": 65.0,
    "test_link_watch.py": 65.0,
    "test_tiling_candidates.py": 65.0,
    "test_lab_real.py": 60.0,
    "test_sim_staged.py": 60.0,
    "test_stages_exact.py": 60.0,
    "test_tiled_exact.py": 60.0,
    "test_tiling_staged.py": 60.0,
    "test_elastic_command.py": 55.0,
    "test_stages_model.py": 55.0,
    "test_docs.py": 50.0,
    "test_tiled_batch_norm.py": 45.0,
    "test_tiled_describing.py": 45.0,
    "test_tiled_norms.py": 40.0,
    "test_tiled_same_program.py": 40.0,
    "test_tiled_without_samples.py": 40.0,
    "test_tiled_sharded_optimizer.py": 35.0,
    "test_functions_mpi_faults.py": 30.0,
    "test_planning.py": 30.0,
    "test_stages_killed.py": 30.0,
    "test_stages_moved.py": 30.0,
    "test_tiled_checkpoints.py": 30.0,
    "test_comm_roll_call.py": 25.0,
    "test_retiling_settles.py": 25.0,
    "test_server_bench.py": 25.0,
    "test_tiled_overheads.py": 25.0,
    "test_tiled_trainer.py": 25.0,
}
"""Seconds of a worker, to a few; of those that take much longer than others."""


START_RAY = ("tests/server/", "tests/elastic/", "tests/sim/test_sim_server_decisions.py")


def group_of(nodeid: str) -> str:
    """The tests of a group are run by one process: those of a file, and all that start Ray.

    A second Ray of the machine would take the memory of the first, and what they leave is looked for.
    """
    return "ray" if nodeid.startswith(START_RAY) else nodeid.split("::")[0]


def cost_s(file: str) -> float:
    """About how long the tests of a file of this name take."""
    return COSTS_S.get(file, OTHERS_S)


def parts(files: list[Path], number: int) -> list[list[Path]]:
    """The files shared out, the longest first, each to the part that has least by then."""
    loads = [(0.0, part) for part in range(number)]
    shared: list[list[Path]] = [[] for _ in range(number)]
    for file in sorted(files, key=lambda file: (-cost_s(file.name), str(file))):
        load_s, part = heapq.heappop(loads)
        shared[part].append(file)
        heapq.heappush(loads, (load_s + cost_s(file.name), part))
    return shared


def main(asked: str) -> list[Path]:
    """The files of the part that was asked for, as `3/8`."""
    part, _, number = asked.partition("/")
    if not (part.isdecimal() and number.isdecimal() and 1 <= int(part) <= int(number) and int(number) >= 2):
        sys.exit(f"PART={asked}: say which part of how many, at least 2, as in PART=3/8")
    files = list(HERE.rglob("test_*.py"))
    return [] if part == number else parts(files, int(number) - 1)[int(part) - 1]


if __name__ == "__main__":
    print(*(file.relative_to(HERE.parent) for file in main(sys.argv[1])))
