"""Real processes that are killed and stopped on purpose: what must come out to the bit, and what must be said."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("ray")

from train_rig import flat, loss_fn, model_fn, train_with

from tatami.engine import crew
from tatami.engine.crew import Pool
from tatami.engine.ray_engine import engine
from tatami.engine.ray_start import MESSAGE_BYTES
from tatami.errors import CheckpointError, InputError, ModelError, NotFiniteError, TrainingError
from tatami.report.server_run import RunReport
from tatami.server import ASP, SGD, SSP, Adam, Backup, RunContext, RunControl, RunSettings, TaskPhase, checkpoints, resume
from tatami.server.learner import Course
from tatami.server.recovery import AbstractRecovery, Checkpoint, FromServers, Ignore
from tatami.testing.faulty import Crash, Crashes, Death

ROUNDS = 5
X = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
Y = torch.sin(X[:, :2])
SETTINGS: dict[str, Any] = {
    "dataset": (X, Y),
    "rounds": ROUNDS,
    "workers": 3,
    "servers": 2,
    "batch_size": 30,
    "optimizer": SGD(lr=0.2, momentum=0.9),
    "clip_norm": 0.5,
    "heartbeat_s": 30.0,  # on a busy machine a sound process may be silent for long
}
HANGS_AFTER_S = 15.0
"""Where a process is stopped on purpose: it is waited for so long, and the others must not be silent for so long."""
ALONE = {"workers": 1, "servers": 1, "spares": 0}
# Each phase in another round, the first and the last among them; process 3 is the spare that came for process 0.
A_DEATH_IN_EVERY_PHASE = Crashes([Crash(process=number, round=number, phase=phase) for number, phase in enumerate(TaskPhase)])


def run(**changes: Any) -> tuple[torch.Tensor, RunReport]:
    model, report = train_with(model_fn, loss_fn, **SETTINGS | changes)
    return flat(model), report


@pytest.fixture(scope="module", autouse=True)
def one_engine() -> Iterator[None]:
    """One Ray, and processes that go from run to run as long as they live."""
    with engine(store_bytes=200 * 2**20):
        SETTINGS["pool"] = Pool()
        yield
        del SETTINGS["pool"]


@pytest.fixture(scope="module")
def undisturbed(one_engine: None) -> torch.Tensor:  # noqa: ARG001 - runs in it
    parameters, report = run(spares=0)
    assert report.failures == ()
    assert report.rounds == len(report.losses) == ROUNDS
    return parameters


def test_bsp_is_training_on_one_machine(undisturbed: torch.Tensor) -> None:
    torch.manual_seed(0)
    model = model_fn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    course = Course(samples=96, batch_size=30, seed=0)
    for round_ in range(ROUNDS):
        batch = course.share(round_=round_, worker=0, members=(0,))
        optimizer.zero_grad()
        loss_fn(model(X[batch]), Y[batch]).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    torch.testing.assert_close(undisturbed, flat(model), rtol=0, atol=1e-6)


@pytest.mark.parametrize("recovery", [FromServers(), Checkpoint(every=2)], ids=lambda recovery: recovery.name)
def test_a_death_in_every_phase_changes_not_a_bit(
    recovery: AbstractRecovery, undisturbed: torch.Tensor, tmp_path: Path
) -> None:
    parameters, report = run(recovery=recovery, directory=tmp_path, on_phase=A_DEATH_IN_EVERY_PHASE, restarts=4)
    assert torch.equal(parameters, undisturbed)
    assert [failure.process for failure in report.failures] == list(range(len(TaskPhase)))
    assert {failure.how for failure in report.failures} == {"died"}


class TwoAndOneThatTakesOver:
    """Processes 0 and 2 die in round 2, and then the first that takes over: a spare, or a new one where spares are late."""

    def __init__(self, died: Path) -> None:
        self._died = died

    def __call__(self, phase: TaskPhase, process: int, round_: int) -> None:
        if (phase, round_) != (TaskPhase.COMPUTE, 2) or process == 1:
            return
        if process > 2:
            try:
                self._died.touch(exist_ok=False)
            except FileExistsError:
                return
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("recovery", [FromServers(), Checkpoint()], ids=lambda recovery: recovery.name)
def test_two_deaths_in_a_round_and_one_while_recovering(
    recovery: AbstractRecovery, undisturbed: torch.Tensor, tmp_path: Path
) -> None:
    dies = TwoAndOneThatTakesOver(tmp_path / "died")
    parameters, report = run(recovery=recovery, directory=tmp_path / "run", spares=2, restarts=4, on_phase=dies)
    assert torch.equal(parameters, undisturbed)
    dead = {failure.process for failure in report.failures}
    assert {0, 2} < dead
    assert len(dead) == 3, "one of those that took over died in the same task"


def test_a_worker_that_dies_before_the_first_round_is_started_again(undisturbed: torch.Tensor, tmp_path: Path) -> None:
    died = tmp_path / "died"

    def model_that_kills_once() -> nn.Module:
        if os.getpid() != driver:
            with suppress(FileExistsError):
                died.touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        return model_fn()

    driver = os.getpid()
    model, report = train_with(model_that_kills_once, loss_fn, **SETTINGS | {"spares": 0, "restarts": 0})
    assert died.exists()
    assert torch.equal(flat(model), undisturbed)
    assert report.failures == (), "nothing was lost"


def test_a_start_that_fails_again_and_again_is_given_up() -> None:
    driver = os.getpid()

    def model_that_kills() -> nn.Module:
        if os.getpid() != driver:
            os.kill(os.getpid(), signal.SIGKILL)
        return model_fn()

    with pytest.raises(TrainingError, match="processes ended before the first round; is there enough memory"):
        train_with(model_that_kills, loss_fn, **SETTINGS | ALONE)


def test_a_start_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "BOOT_TIMEOUT_S", 1.0)
    driver = os.getpid()

    def model_that_is_never_built() -> nn.Module:
        while os.getpid() != driver:
            time.sleep(1.0)
        return model_fn()

    with pytest.raises(TrainingError, match=r"(worker process|server) 0 was not up 1 s after it was started"):
        train_with(model_that_is_never_built, loss_fn, **SETTINGS | ALONE)


def test_ignore_goes_on_at_once_and_applies_every_round() -> None:
    crash = Crash(process=1, round=2, phase=TaskPhase.BETWEEN_SHARDS)
    parameters, report = run(recovery=Ignore(), restarts=0, on_phase=Crashes([crash]))
    assert report.rounds == ROUNDS
    assert [failure.who for failure in report.failures] == ["worker 1"]
    assert torch.isfinite(parameters).all()
    assert report.workers == 3


def test_a_process_that_hangs_is_declared_dead(undisturbed: torch.Tensor) -> None:
    crash = Crash(process=1, round=1, phase=TaskPhase.BETWEEN_SHARDS, death=Death.STOP)
    parameters, report = run(on_phase=Crashes([crash]), restarts=0, heartbeat_s=HANGS_AFTER_S)
    assert torch.equal(parameters, undisturbed)
    (failure,) = report.failures
    assert (failure.process, failure.how) == (1, "hung")
    assert failure.silent_s >= HANGS_AFTER_S


@pytest.mark.parametrize(("how", "heartbeat_s"), [(signal.SIGKILL, SETTINGS["heartbeat_s"]), (signal.SIGSTOP, HANGS_AFTER_S)])
def test_a_replica_survives_its_server(how: signal.Signals, heartbeat_s: float, undisturbed: torch.Tensor) -> None:
    def kill(runtime: RunControl) -> None:
        if runtime.version == 2:
            os.kill(runtime.pids()["server 0"], how)

    parameters, report = run(replicas=2, on_round=kill, heartbeat_s=heartbeat_s, spares=0)
    assert torch.equal(parameters, undisturbed)
    assert [failure.who for failure in report.failures] == ["server 0"]


def test_vectors_too_large_for_a_message_come_to_the_same_bits_whoever_dies() -> None:
    def run_large(**changes: Any) -> tuple[torch.Tensor, RunReport]:
        settings = SETTINGS | {"optimizer": SGD(lr=0.001)} | changes
        model, report = train_with(lambda: nn.Sequential(nn.Linear(6, 150_000), nn.Linear(150_000, 2)), loss_fn, **settings)
        return flat(model), report

    def kill(runtime: RunControl) -> None:
        if runtime.version == 2:
            os.kill(runtime.pids()["server 0"], signal.SIGKILL)

    undisturbed, report = run_large(spares=0)
    assert undisturbed.nbytes / 2 > MESSAGE_BYTES
    assert report.losses[-1] < report.losses[0]
    parameters, report = run_large(on_phase=A_DEATH_IN_EVERY_PHASE, restarts=4)
    assert len(report.failures) == len(TaskPhase)
    assert torch.equal(parameters, undisturbed)
    parameters, report = run_large(replicas=2, on_round=kill, spares=0)
    assert [failure.who for failure in report.failures] == ["server 0"]
    assert torch.equal(parameters, undisturbed)


def test_a_server_comes_back_from_a_checkpoint(undisturbed: torch.Tensor, tmp_path: Path) -> None:
    def kill(runtime: RunControl) -> None:
        if runtime.version == 3 and not any("server" in failure.who for failure in runtime.failures):
            os.kill(runtime.pids()["server 1"], signal.SIGKILL)

    parameters, _ = run(recovery=Checkpoint(every=2), directory=tmp_path, on_round=kill, spares=0)
    assert torch.equal(parameters, undisturbed)


def test_resume_goes_on_to_the_same_bits(undisturbed: torch.Tensor, tmp_path: Path) -> None:
    task: dict[str, Any] = {
        "model_fn": model_fn,
        "loss_fn": loss_fn,
        "dataset": (X, Y),
        "context": RunContext(pool=SETTINGS["pool"]),
    }
    run(rounds=3, directory=tmp_path, save_every=1, spares=0)
    with pytest.raises(InputError, match="its samples is 96, here it is 90"):
        resume(tmp_path, **task | {"dataset": (X[:90], Y[:90])})
    with pytest.raises(InputError, match="holds the checkpoints of another run"):
        run(directory=tmp_path, save_every=1)
    damaged = tmp_path / "step-00000003" / "manifest.json"
    damaged.write_text("{")
    with pytest.warns(UserWarning, match="step-00000003 is damaged.*version 2 is used"):
        model, report = resume(tmp_path, settings=replace(RunSettings.read(tmp_path), rounds=ROUNDS), **task)
    assert torch.equal(flat(model), undisturbed)
    assert (report.start, report.rounds) == (2, ROUNDS)


def test_without_spares_the_others_go_on_and_then_too_few_stop(tmp_path: Path) -> None:
    crashes = [Crash(process=number, round=number + 1, phase=TaskPhase.COMPUTE) for number in (0, 1)]
    with (
        pytest.warns(UserWarning, match="no spare is left for worker 0: 2 workers share its part"),
        pytest.raises(TrainingError, match=r"1 workers are left, fewer than min_workers=2.*version 2 is saved"),
    ):
        run(spares=0, restarts=0, min_workers=2, directory=tmp_path, on_phase=Crashes(crashes))
    assert (tmp_path / "step-00000002").is_dir()


def test_workers_join_and_leave() -> None:
    sizes: list[int] = []

    def change(runtime: RunControl) -> None:
        sizes.append(sum("worker" in name for name in runtime.pids()))
        if runtime.version == 1:
            runtime.remove_worker(0)
        if runtime.version == 2:
            runtime.add_worker()

    _, report = run(rounds=400, on_round=change, spares=0)
    assert report.rounds == 400
    assert min(sizes) == 2
    assert sizes[-1] == report.workers == 3


@pytest.mark.parametrize("terms", [{"consistency": SSP(staleness=1), "optimizer": Adam(lr=0.01)}, {"consistency": ASP()}])
def test_updates_are_applied_once_each(terms: dict[str, Any]) -> None:
    _, report = run(**terms, clip_norm=None, spares=0)
    assert report.rounds == len(report.losses) == 3 * ROUNDS  # each update is a commit of its own


def test_a_loss_that_is_not_finite_names_the_round() -> None:
    with (
        pytest.warns(UserWarning, match="the update of worker [012] in round 0 is not applied: its loss is nan"),
        pytest.raises(NotFiniteError, match="no worker has a finite loss in round 0"),
    ):
        train_with(model_fn, lambda output, _: output.mean() * float("nan"), **SETTINGS | ALONE)


def test_a_loss_that_is_no_scalar() -> None:
    with pytest.raises(InputError, match=r"a tensor of shape \(30, 2\)"):
        train_with(model_fn, lambda output, target: (output - target) ** 2, **SETTINGS | ALONE)


def test_a_model_that_differs_between_workers() -> None:
    here = os.getpid()

    def differs() -> nn.Module:
        return nn.Linear(6, 2, bias=os.getpid() == here)

    with pytest.raises(ModelError, match="another model in worker process"):
        train_with(differs, loss_fn, **SETTINGS | ALONE)


SCRIPT = """
import os, torch
from torch import nn
from tatami.server import RunContext, RunSettings, train
from tatami.engine.processes import started_with
before = set(os.listdir("/dev/shm"))
folders = set()
def note(run):
    for pid in run.pids().values():
        variables = open(f"/proc/{pid}/environ", "rb").read().decode().split(chr(0))
        folders.update(each.partition("=")[2] for each in variables if each.startswith("TATAMI_RAY_FOLDER="))
train(
    lambda: nn.Linear(4, 1), nn.MSELoss(), dataset=(torch.zeros(8, 4), torch.ones(8, 1)),
    settings=RunSettings(rounds=2, workers=1, servers=1, heartbeat_s=60.0), context=RunContext(on_round=note),
)
(folder,) = folders
new = [name for name in set(os.listdir("/dev/shm")) - before if "plasma" in name or "ray" in name]
print("left:", new, os.path.exists(folder), started_with("TATAMI_RAY_FOLDER", folder))
"""


def test_nothing_is_left_behind() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=800, check=False)
    assert done.stdout.strip() == "left: [] False []", done.stderr


def test_backup_workers_close_the_round_without_the_last() -> None:
    parameters, report = run(consistency=Backup(workers=1), spares=0)
    assert report.rounds == len(report.losses) == ROUNDS
    assert torch.isfinite(parameters).all()


def test_dalys_interval_is_learnt_on_the_way(undisturbed: torch.Tensor, tmp_path: Path) -> None:
    crash = Crash(process=1, round=3, phase=TaskPhase.COMPUTE)
    recovery = Checkpoint(every="daly", mtbf_s=60.0, directory=tmp_path)
    parameters, report = run(recovery=recovery, on_phase=Crashes([crash]))
    assert torch.equal(parameters, undisturbed)
    assert len(report.failures) == 1
    assert 1 <= len(list(tmp_path.glob("step-*"))) <= 2


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_fills_up_is_said_and_the_run_goes_on(
    undisturbed: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(runtime: RunControl) -> None:
        if runtime.version == 2:
            monkeypatch.setattr(checkpoints, "write_bytes", full)

    with pytest.warns(UserWarning, match=r"no checkpoint was written at version 2: .*No space left"):
        parameters, _ = run(directory=tmp_path, save_every=1, on_round=fill, spares=0)
    assert torch.equal(parameters, undisturbed)
    assert checkpoints.versions(tmp_path) == (1,)
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".part")]


def test_a_disk_that_is_full_from_the_start_stops_a_run_that_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "write_bytes", full)
    with pytest.raises(CheckpointError, match=r"the first checkpoint failed: .*No space left"):
        run(recovery=Checkpoint(), directory=tmp_path, spares=0)


def test_what_happened_is_kept_where_a_run_stops(tmp_path: Path) -> None:
    def kill(runtime: RunControl) -> None:
        if runtime.version == 2:
            os.kill(runtime.pids()["server 1"], signal.SIGKILL)

    with pytest.raises(TrainingError, match=r"the only copy of its shards.*replicas=2"):
        run(on_round=kill, spares=0, report=tmp_path / "report.json")
    report = RunReport.load(tmp_path / "report.json")
    assert report.rounds >= 2
    assert [failure.who for failure in report.failures] == ["server 1"]


def test_lost_copies_are_made_again_so_that_the_other_server_may_die_too() -> None:
    """Server 0 dies; once it is whole again, server 1 dies, and the run lives from what server 0 was given."""
    killed: list[int] = []
    pauses_s = (0.1 * 1.1**number for number in count())

    def kill(runtime: RunControl) -> None:
        if len(runtime.coordinator.servers) < 2:
            # A new server is told of between rounds, which are so short that all would be over before it is up. Pauses that
            # grow wait for it, however long its start takes: the first fifty rounds take two minutes.
            time.sleep(next(pauses_s))
        elif len(killed) < 2:
            killed.append(len(killed))
            os.kill(runtime.pids()[f"server {killed[-1]}"], signal.SIGKILL)

    parameters, report = run(replicas=2, on_round=kill, rounds=100, spares=0)
    again, _ = run(replicas=2, rounds=100, spares=0)
    assert [failure.who for failure in report.failures if "server" in failure.who] == ["server 0", "server 1"]
    assert torch.equal(parameters, again)
