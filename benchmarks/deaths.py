"""What a death costs, by four ways to go on:  python benchmarks/deaths.py [--deaths 10] [--step-s 2.0] [--contestants ...]

The same network, the same global batches and the same time of a step (every layer sleeps, a third of `--step-s` in the forward
pass of all and the rest in the backward pass, so that all ranks fit on any machine) under

- tatami: `tatami.elastic`, where the others repair the run and a new rank joins it;
- torchrun: its elastic restart of all ranks, from a checkpoint after every step;
- torchft: a lighthouse and a manager for each rank (`pip install torchft-nightly`; left out by name where it is not installed);
- server: `tatami.server` with `FromServers()`.

One rank is killed (SIGKILL) or stopped (SIGSTOP) at a random moment of every `EVERY`-th step. Each line tells of one contestant
and one signal: the seconds by which such a step was longer than the median of the others, how many steps were made again, how
many samples were in no update, and how far the final parameters are from those of the same run without deaths.

With `--lab` tatami's ranks are on hosts of a lab with links of 1 Gbit/s, each a node of Ray; the process that leads the run is
on the first. That needs Linux and root (docs/lab.md): `--lab --deaths 30` takes some 13 minutes for both signals.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from torch import fx, nn

from tatami.bench.interleaved import machine

RESULTS = Path(__file__).parent / "results" / "deaths.jsonl"
LAB_RESULTS = RESULTS.with_name("deaths-lab.jsonl")
EVERY = 4
"""Steps from death to death: the rank that replaces the dead one must be up again."""
BATCH = 64
LAYERS = 12
LIMIT_S = 1800.0
"""For one contestant."""

State = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is run; read by the processes of all contestants.

    Attributes:
        delays: seconds after the beginning of a step at which a rank is struck, by step.
        folder: where the ranks leave what they have to tell.
        address: of a Ray cluster with a node for each rank, for tatami; None: this machine.
    """

    steps: int
    step_s: float
    ranks: int
    heartbeat_s: float
    number: int
    delays: Mapping[int, float]
    folder: str
    address: str | None = None

    @property
    def path(self) -> Path:
        return Path(self.folder)


class Pause(nn.Module):
    """A layer that takes its time: a third in its forward pass, and the rest in its backward pass."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Any) -> Any:
        return x if isinstance(x, fx.Proxy) else _Paused.apply(x, self.seconds)  # type: ignore[no-untyped-call]


class _Paused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds / 3)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds / 3)
        return grad, None


def network(step_s: float = 0.0) -> nn.Module:
    """Whose forward and backward pass take so long."""
    torch.manual_seed(0)
    pauses = [Pause(step_s / LAYERS) for _ in range(LAYERS)]
    return nn.Sequential(nn.Linear(64, 64), *pauses, nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)).double()


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(BATCH, 64) and (BATCH,): the global batch of a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 64, generator=generator).double(), torch.randint(10, (BATCH,), generator=generator)


def plain(steps: int) -> State:
    """One process, no deaths."""
    model = network()
    optimizer = optimizer_of(model)
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model.state_dict()


def strike(case: Case, step: int) -> None:
    """In the rank to be struck, at the beginning of a step: each step once."""
    if step not in case.delays:
        return
    try:
        (case.path / f"struck-{step}").touch(exist_ok=False)
    except FileExistsError:
        return
    threading.Timer(case.delays[step], os.kill, [os.getpid(), case.number]).start()


def reached(case: Case, step: int, *, by: str = "") -> None:
    """By one rank, after a step."""
    with (case.path / f"reached{by}").open("a") as file:
        print(step, time.time(), file=file)


def outcome(case: Case, name: str, state: State, *, expected: State, samples_lost: int | None = 0) -> dict[str, Any]:
    """The line of a contestant, from when the steps were reached; of a step that was made again, the last time counts."""
    lines = [line.split() for line in (case.path / "reached").read_text().splitlines()]
    made = Counter(int(step) for step, _ in lines)
    at_s = {int(step): float(when) for step, when in lines}
    spans = {step: at_s[step] - at_s[step - 1] for step in at_s if step - 1 in at_s}
    usual = statistics.median(span for step, span in spans.items() if step not in case.delays)
    lost = [_around(step, at_s, usual) for step in case.delays]
    off = max(float((state[key] - value).abs().max()) for key, value in expected.items())
    return {
        "contestant": name,
        "deaths": len(lost),
        "step_median_s": usual,
        "lost_mean_s": statistics.mean(lost),
        "lost_s": lost,
        "steps_again": made.total() - len(made),
        "samples_lost": samples_lost if samples_lost is None else samples_lost + BATCH * (case.steps - len(made)),
        "parameters_off": off,
    }


def _around(step: int, at_s: Mapping[int, float], usual_s: float) -> float:
    """By how much longer than usual it took to come past this step, where it was made or left out."""
    before, after = max(each for each in at_s if each < step), min(each for each in at_s if each >= step)
    return at_s[after] - at_s[before] - usual_s * (after - before)


# -- tatami -------------------------------------------------------------------------------------------------------------------


def with_tatami(case: Case) -> dict[str, Any]:
    """The others repair the run; a new rank is started for the dead one, and let in when it is up."""
    from ray_nodes import await_nodes
    from tatami.elastic import ElasticContext, ElasticControl, ElasticSettings, MemberChange, run_elastic
    from tatami.engine.ray_engine import engine

    controls: list[ElasticControl] = []

    def replace(change: MemberChange) -> None:
        for _ in range(case.ranks - len(change.members)):
            controls[0].add()

    with engine(address=case.address) as ray:
        await_nodes(ray, 1 if case.address is None else case.ranks)
        result = run_elastic(
            partial(_tatami_rank, case),
            settings=ElasticSettings(ranks=case.ranks, heartbeat_s=case.heartbeat_s),
            context=ElasticContext(address=case.address, on_change=replace, on_start=controls.append),
        )
    (state,) = (state for state in result.values.values() if state)  # rank 0 has it
    return outcome(case, "tatami", state, expected=plain(case.steps))


def _tatami_rank(case: Case) -> State:
    import tatami
    from tatami.train import whole_state_dict

    comm = tatami.init()
    model = tatami.tile(network(case.step_s), comm, batch_size=BATCH, speeds="equal", reduction="mean", quiet=True)
    optimizer = optimizer_of(model)
    loop = tatami.steps(model, optimizer, count=case.steps)
    for step in loop:
        with step:
            if comm.rank == 1:
                strike(case, step.number)
            x, y = model.local(*batch(step.number))
            loss = nn.functional.cross_entropy(model(x), y) if len(y) else model(x).sum()
            loss.backward()
            step.update(loss)
        if step.is_done and comm.rank == 0:
            reached(case, step.number)
    state: State = loop.whole(lambda: whole_state_dict(model))
    return state


# -- torchrun -----------------------------------------------------------------------------------------------------------------


def with_torchrun(case: Case) -> dict[str, Any]:
    """Every rank is started again, and reads the checkpoint of the last step."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}"]
    words += [f"--max-restarts={10 * len(case.delays)}", __file__, "--rank-of", "torchrun", "--case", case.folder]
    # Without the second, the ranks of a restart find the addresses of the dead in the store that both share, and never meet.
    settings = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    _end_well(case, [_started(case, words, settings, log="torchrun")])
    saved = torch.load(case.path / "saved.pt", weights_only=True)
    return outcome(case, "torchrun", saved["model"], expected=plain(case.steps))


def _torchrun_rank(case: Case) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", timeout=timedelta(seconds=case.heartbeat_s))
    rank, size = dist.get_rank(), dist.get_world_size()
    model = network(case.step_s)
    optimizer = optimizer_of(model)
    done, saved = 0, case.path / "saved.pt"
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["done"]
    parallel = DistributedDataParallel(model)
    for step in range(done, case.steps):
        if rank == 1:
            strike(case, step)
        x, y = batch(step)
        optimizer.zero_grad()
        share = y[rank::size]
        loss = nn.functional.cross_entropy(parallel(x[rank::size]), share) * len(share) * size / BATCH
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if rank == 0:
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": step + 1}, case.path / "part.pt"
            )
            os.replace(case.path / "part.pt", saved)
            reached(case, step)
    dist.destroy_process_group()


# -- torchft ------------------------------------------------------------------------------------------------------------------


def with_torchft(case: Case) -> dict[str, Any]:
    """A step in which a rank dies is given up and made again; the dead one starts again and fetches the weights."""
    if find_spec("torchft") is None:
        return {"contestant": "torchft", "left_out": "torchft is not installed: pip install torchft-nightly"}
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=round(1000 * case.heartbeat_s)
    )
    settings = {"OMP_NUM_THREADS": "1", "TORCHFT_LIGHTHOUSE": lighthouse.address()}
    words = [sys.executable, __file__, "--rank-of", "torchft", "--case", case.folder, "--number"]
    try:
        ranks = [partial(_started, case, [*words, str(rank)], settings, log=f"torchft-{rank}") for rank in range(case.ranks)]
        _end_well(case, [start() for start in ranks], again=ranks)
    finally:
        lighthouse.shutdown()
    # A rank that catches up leaves out steps that others have made.
    lines = [line.split() for file in case.path.glob("reached-*") for line in file.read_text().splitlines()]
    first_s = {int(step): min(float(when) for other, when in lines if other == step) for step, _ in lines}
    (case.path / "reached").write_text("".join(f"{step} {at_s}\n" for step, at_s in sorted(first_s.items())))
    return outcome(case, "torchft", torch.load(case.path / "saved.pt", weights_only=True), expected=plain(case.steps))


def _torchft_rank(case: Case, number: int) -> None:
    import torch.distributed as dist
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    timeout = timedelta(seconds=case.heartbeat_s)
    store: Any = cast(Any, dist).TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model = network(case.step_s)
    plain_optimizer = optimizer_of(model)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        plain_optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": plain_optimizer.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        timeout=timeout,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        replica_id=f"rank{number}",
    )
    parallel, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, plain_optimizer)
    while (step := manager.current_step()) < case.steps:
        optimizer.zero_grad()  # the quorum
        step = manager.current_step()
        if number == 1:
            strike(case, step)
        rank, size = manager.participating_rank() or 0, manager.num_participants()
        x, y = batch(step)
        share = y[rank::size]
        loss = nn.functional.cross_entropy(parallel(x[rank::size]), share) * len(share) * size / BATCH
        loss.backward()
        optimizer.step()
        if manager.current_step() > step:
            reached(case, step, by=f"-{number}")
    if number == 0:
        torch.save(model.state_dict(), case.path / "saved.pt")
    manager.shutdown()


# -- tatami.server ------------------------------------------------------------------------------------------------------------


def with_server(case: Case) -> dict[str, Any]:
    """A spare takes the place of the dead worker. The server draws its batches: its own undisturbed run is compared with."""
    from tatami import server

    timers: list[threading.Timer] = []

    def train(delays: Mapping[int, float], step_s: float) -> tuple[State, server.RunReport]:
        def on_round(run: server.RunControl) -> None:
            if run.version in delays:
                up = [pid for name, pid in run.pids().items() if name.startswith("worker") and pid]  # 0: not up yet
                timers.append(threading.Timer(delays[run.version], os.kill, [up[-1], case.number]))
                timers[-1].start()

        def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(output, target)

        settings = server.RunSettings(
            rounds=case.steps,
            workers=case.ranks,
            servers=2,
            spares=1,
            restarts=2 * len(case.delays),
            batch_size=BATCH,
            optimizer=server.SGD(lr=0.1, momentum=0.9),
            heartbeat_s=case.heartbeat_s,
        )
        x, y = (torch.cat(parts) for parts in zip(*map(batch, range(case.steps)), strict=True))
        model, report = server.train(
            partial(network, step_s), loss_fn, dataset=(x, y), settings=settings, context=server.RunContext(on_round=on_round)
        )
        return model.state_dict(), report

    expected, _ = train({}, 0.0)
    state, report = train(case.delays, case.step_s)
    for timer in timers:
        timer.join()
    (case.path / "reached").write_text("".join(f"{step} {at_s}\n" for step, at_s in enumerate(report.reached_s, start=-1)))
    return outcome(case, "server", state, expected=expected, samples_lost=None)


# -- in a lab -----------------------------------------------------------------------------------------------------------------


def in_lab(options: argparse.Namespace) -> None:
    """The same command, on the first host of a lab."""
    from ray_nodes import address_of, drive, ray_cluster
    from tatami.cluster import Cluster, Processor
    from tatami.lab import Lab

    hosts = tuple(Processor(name=f"p{i}", speed=1.0, host=f"h{i}") for i in range(options.ranks))
    with tempfile.TemporaryDirectory(prefix="tatami-") as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="latency is not emulated")
        with Lab(Cluster(processors=hosts)) as lab, ray_cluster(lab, folder=Path(folder)) as log:
            words = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--address", address_of(lab)]
            drive(lab, words, log=log, timeout_s=2 * LIMIT_S)


# -- all ----------------------------------------------------------------------------------------------------------------------

CONTESTANTS: dict[str, Callable[[Case], dict[str, Any]]] = {
    "tatami": with_tatami,
    "torchrun": with_torchrun,
    "torchft": with_torchft,
    "server": with_server,
}


def _started(case: Case, words: list[str], settings: Mapping[str, str], *, log: str) -> subprocess.Popen[bytes]:
    with (case.path / f"{log}.log").open("ab") as file:
        return subprocess.Popen(words, env={**os.environ, **settings}, stdout=file, stderr=file)


def _end_well(
    case: Case, running: list[subprocess.Popen[bytes]], *, again: Sequence[Callable[[], subprocess.Popen[bytes]]] | None = None
) -> None:
    """Wait for all; with `again`, start those that fail again, and kill and start again what is stopped for the heartbeat."""
    end_s = time.monotonic() + LIMIT_S
    stopped_s: dict[int, float] = {}
    try:
        while any(each.poll() is None for each in running):
            if time.monotonic() > end_s:
                raise SystemExit(f"no end after {LIMIT_S:.0f} s; the logs are in {case.folder}")
            for number, each in enumerate(running):
                is_stuck = again is not None and each.poll() is None and _is_stopped(each.pid)
                if is_stuck and time.monotonic() - stopped_s.setdefault(each.pid, time.monotonic()) > case.heartbeat_s:
                    each.kill()
                    each.wait()
                if again is not None and each.poll() not in (None, 0):
                    running[number] = again[number]()
            time.sleep(0.05)
    finally:
        for each in running:
            if each.poll() is None:
                each.terminate()  # torchrun ends its ranks
                each.wait(timeout=60)
    if bad := [each.returncode for each in running if each.returncode]:
        logs = "\n".join(path.read_text()[-4000:] for path in sorted(case.path.glob("*.log")))
        raise SystemExit(f"exit codes {bad}\n{logs}")


def _is_stopped(pid: int) -> bool:
    from tatami.engine.processes import is_stopped

    return is_stopped(pid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deaths", type=int, default=10)
    parser.add_argument("--step-s", type=float, default=2.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--heartbeat-s", type=float, default=5.0, help="a rank that is silent for longer counts as dead")
    parser.add_argument("--signals", default="KILL,STOP")
    parser.add_argument("--contestants", help="all by default; in a lab, tatami")
    parser.add_argument("--lab", action="store_true", help="on hosts of a lab: see above")
    parser.add_argument("--output", type=Path, help=f"{RESULTS.name} by default; of a lab, {LAB_RESULTS.name}")
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--rank-of", choices=("torchrun", "torchft"), help=argparse.SUPPRESS)
    parser.add_argument("--case", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.rank_of:
        case = _read(options.case)
        return _torchrun_rank(case) if options.rank_of == "torchrun" else _torchft_rank(case, options.number)
    if unknown := set(options.signals.split(",")) - {"KILL", "STOP"}:
        parser.error(f"--signals: {', '.join(sorted(unknown))} is none of KILL, STOP")
    contestants = (options.contestants or ("tatami" if options.lab else ",".join(CONTESTANTS))).split(",")
    if options.lab and contestants != ["tatami"]:
        parser.error("--lab: only tatami's ranks can be on the hosts of a lab; leave --contestants out")
    if options.lab and options.address is None:
        return in_lab(options)
    if options.address is not None:
        from ray_nodes import await_port

        await_port(options.address)
    chance = random.Random(0)
    delays = {EVERY * (number + 1): chance.uniform(0.1, 0.9) * options.step_s for number in range(options.deaths)}
    given = sys.argv[1:] if options.address is None else sys.argv[1:-2]
    facts = {"step_s": options.step_s, "ranks": options.ranks, "heartbeat_s": options.heartbeat_s, "machine": machine()}
    lines: list[dict[str, Any]] = [{"command": " ".join(["python", "benchmarks/deaths.py", *given]), **facts}]
    for name in options.signals.split(","):
        for contestant in contestants:
            with tempfile.TemporaryDirectory() as folder:
                case = Case(
                    steps=max(delays) + EVERY,
                    step_s=options.step_s,
                    ranks=options.ranks,
                    heartbeat_s=options.heartbeat_s,
                    number=int(getattr(signal, f"SIG{name}")),
                    delays=delays,
                    folder=folder,
                    address=options.address,
                )
                (case.path / "case.json").write_text(json.dumps(asdict(case)))
                lines.append({"signal": name, **CONTESTANTS[contestant](case)})
            print(json.dumps(lines[-1]), flush=True)
    output = options.output or (LAB_RESULTS if options.lab else RESULTS)
    output.parent.mkdir(exist_ok=True)
    output.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    print(output)
    return None


def _read(folder: Path) -> Case:
    facts = json.loads((folder / "case.json").read_text())
    return Case(**{**facts, "delays": {int(step): delay for step, delay in facts["delays"].items()}})


if __name__ == "__main__":
    main()
