"""Seconds lost for each death:  python benchmarks/seconds_lost.py [--deaths 10] [--task-s 2.0]

Four workers, two servers, one spare; each of the three recoveries trains while a worker is killed (SIGKILL) at a random moment
of every third round. Beside them the same training under torchrun: four ranks with gloo, a checkpoint after every step, and the
elastic restart of all ranks at a death. A task sleeps for `--task-s` in place of computing, so that four of them fit on any
machine. Writes benchmarks/results/seconds_lost.jsonl: the command, and a line for each contestant.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tatami import server
from tatami.bench.interleaved import machine
from tatami.server.recovery import AbstractRecovery

RESULTS = Path(__file__).parent / "results" / "seconds_lost.jsonl"
WORKERS = 4
EVERY = 3
"""Rounds from death to death: the spare must be up again."""
TORCHRUN_S = 1200.0

ELASTIC = """
import os, signal, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

folder, steps, task_s, deaths = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), eval(sys.argv[4])
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
done = 0
if (folder / "saved.pt").exists():
    saved = torch.load(folder / "saved.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    done = saved["done"]
parallel = DistributedDataParallel(model)
x, y = torch.randn(64, 64), torch.randint(10, (64,))
for step in range(done, steps):
    marker = folder / f"death-{step}"
    if rank == 1 and step in deaths and not marker.exists():
        time.sleep(deaths[step])
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(task_s)
    optimizer.zero_grad()
    nn.functional.cross_entropy(parallel(x), y).backward()
    optimizer.step()
    if rank == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": step + 1}
        torch.save(state, folder / "part.pt")
        os.replace(folder / "part.pt", folder / "saved.pt")
        with open(folder / "reached", "a") as file:
            print(step + 1, time.time(), file=file)
dist.destroy_process_group()
"""


def with_recovery(recovery: AbstractRecovery, delays: dict[int, float], *, task_s: float, folder: Path) -> dict[str, Any]:
    """Train under one policy; `delays` says by round how long after its start a worker is killed."""
    struck: list[float] = []
    timers: list[threading.Timer] = []
    began: list[float] = []

    def strike(pid: int) -> None:
        struck.append(time.monotonic())
        os.kill(pid, signal.SIGKILL)

    def on_round(run: server.RunControl) -> None:
        if not began:
            began.append(time.monotonic() - run.report().reached_s[-1])
        if run.version in delays:
            timers.append(threading.Timer(delays[run.version], strike, [run.pids()["worker 1"]]))
            timers[-1].start()

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        time.sleep(task_s)
        return nn.functional.cross_entropy(output, target)

    _, report = server.train(
        lambda: nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)),
        loss_fn,
        dataset=(torch.randn(256, 64), torch.randint(10, (256,))),
        directory=folder,
        settings=server.RunSettings(
            rounds=max(delays) + EVERY,
            workers=WORKERS,
            servers=2,
            spares=1,
            restarts=2 * len(delays),
            optimizer=server.SGD(lr=0.1, momentum=0.9),
            recovery=recovery,
        ),
        context=server.RunContext(
            on_round=on_round,
        ),
    )
    for timer in timers:
        timer.join()
    lost = [failure.lost_s for failure in report.failures if failure.lost_s is not None]
    noticed = [failure.at_s + began[0] - at_s for failure, at_s in zip(report.failures, struck, strict=False)]
    return {
        "contestant": recovery.name,
        "deaths": len(report.failures),
        "round_median_s": statistics.median(report.round_s),
        "lost_mean_s": statistics.mean(lost),
        "lost_s": lost,
        "noticed_after_max_s": max(noticed),
        "noticed_after_s": noticed,
    }


def with_torchrun(delays: dict[int, float], *, task_s: float, folder: Path) -> dict[str, Any]:
    """The same deaths under torchrun."""
    script = folder / "elastic.py"
    script.write_text(ELASTIC)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}"]
    words += [
        f"--max-restarts={10 * len(delays)}",
        str(script),
        str(folder),
        str(max(delays) + EVERY),
        str(task_s),
        repr(delays),
    ]
    # Without the second, the ranks of a restart find the addresses of the dead in the store that both share, and never meet.
    settings = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with (folder / "torchrun.log").open("w") as log:
        started = subprocess.Popen(words, env=os.environ | settings, stdout=log, stderr=log)
        try:
            ended = f"exit code {started.wait(timeout=TORCHRUN_S)}"
        except subprocess.TimeoutExpired:
            started.terminate()  # it ends its ranks
            started.wait(timeout=60)
            ended = f"no end after {TORCHRUN_S:.0f} s"
    if ended != "exit code 0":
        raise SystemExit(f"torchrun: {ended}\n{(folder / 'torchrun.log').read_text()[-4000:]}")
    reached = {int(step): float(at_s) for step, at_s in map(str.split, (folder / "reached").read_text().splitlines())}
    spans = {step: reached[step + 1] - reached[step] for step in sorted(reached)[:-1]}
    usual = statistics.median(span for step, span in spans.items() if step not in delays)
    lost = [spans[step] - usual for step in delays]
    return {
        "contestant": "torchrun elastic restart",
        "deaths": len(delays),
        "round_median_s": usual,
        "lost_mean_s": statistics.mean(lost),
        "lost_s": lost,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deaths", type=int, default=10)
    parser.add_argument("--task-s", type=float, default=2.0)
    options = parser.parse_args()
    chance = random.Random(0)
    delays = {EVERY * (number + 1): chance.uniform(0.1, 0.9) * options.task_s for number in range(options.deaths)}
    lines: list[dict[str, Any]] = [{"command": shlex.join(["python", "benchmarks/seconds_lost.py", *sys.argv[1:]])}]
    for recovery in (server.Ignore(), server.FromServers(), server.Checkpoint()):
        with tempfile.TemporaryDirectory() as folder:
            lines.append(with_recovery(recovery, delays, task_s=options.task_s, folder=Path(folder)))
        print(json.dumps(lines[-1]), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        lines.append(with_torchrun(delays, task_s=options.task_s, folder=Path(folder)))
    print(json.dumps(lines[-1]), flush=True)
    for line in lines[1:]:
        line |= {"task_s": options.task_s, "workers": WORKERS, "machine": machine()}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    print(RESULTS)


if __name__ == "__main__":
    main()
