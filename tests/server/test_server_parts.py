"""The parts of a run that need no other process: optimizers, shards, shares of a batch, checkpoints, intervals."""

import json
import math
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from train_rig import train_with

from tatami.errors import CheckpointError, InputError, ModelError
from tatami.records import Records
from tatami.report.server_run import Failure, RunReport, with_costs
from tatami.server import BSP, SSP, Backup, RunSettings, checkpoints
from tatami.server.actions import ApplyShard, Contribution, SumShard
from tatami.server.learner import Course, check_model
from tatami.server.ledger import Ledger
from tatami.server.optimizers import SGD, AbstractOptimizer, Adam, Vector
from tatami.server.pieces import cut
from tatami.server.recovery import Checkpoint, daly_s
from tatami.server.saving import Saved
from tatami.server.shard import ShardServer
from tatami.server.worker_process import TaskOutcome

X, Y = torch.zeros(8, 3), torch.zeros(8, 1)


@pytest.mark.parametrize(
    ("ours", "make"),
    [
        (SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
        (SGD(lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        (Adam(lr=0.01), lambda p: torch.optim.Adam(p, lr=0.01)),
    ],
)
def test_optimizers_step_as_torch(ours: AbstractOptimizer, make) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(0)
    values = rng.standard_normal(7)
    theirs = torch.tensor(values.copy(), requires_grad=True)
    optimizer = make([theirs])
    state: dict[str, Vector] = {name: np.zeros(7) for name in ours.slots}
    for count in range(1, 6):
        gradient = rng.standard_normal(7)
        theirs.grad = torch.tensor(gradient)
        optimizer.step()
        ours.step(values, gradient, state=state, count=count)
    np.testing.assert_allclose(values, theirs.detach().numpy(), rtol=1e-12)


def applying(
    *contributions: Contribution, squared_norm: float | None = None, clocks: tuple[tuple[int, int], ...] = ()
) -> ApplyShard:
    where: dict[str, Any] = {"ticket": 0, "shard": 0, "server": 0, "version": 1}
    return ApplyShard(contributions=contributions, squared_norm=squared_norm, clocks=clocks, **where)


def test_a_push_that_is_late_or_repeated_changes_nothing() -> None:
    server = ShardServer({0: np.zeros(2)}, optimizer=SGD(lr=1.0))
    contribution = Contribution(worker=0, process=0, round=0)
    names: dict[str, Any] = {"contribution": contribution, "samples": 1}
    assert server.stage(0, [np.ones(2)], attempt=0, **names)
    assert server.stage(0, [np.ones(2)], attempt=0, **names)
    after = server.apply(applying(contribution, clocks=((0, 1),)))
    np.testing.assert_array_equal(after, [-1.0, -1.0])
    assert not server.stage(0, [np.ones(2)], attempt=0, **names), "of a round that is applied"
    server.load(0, server.snapshot(0), attempt=1, clocks=((0, 0),))
    assert not server.stage(0, [np.ones(2)], attempt=0, **names), "of an attempt that was rolled back"
    assert server.stage(0, [np.ones(2)], attempt=1, **names)


def test_the_step_is_the_mean_over_the_samples_that_arrived_and_clipped() -> None:
    server = ShardServer({0: np.zeros(1)}, optimizer=SGD(lr=1.0), clip_norm=0.5)
    both = tuple(Contribution(worker=worker, process=worker, round=0) for worker in (0, 1))
    for contribution, value, samples in zip(both, (1.0, 5.0), (3, 1), strict=True):
        server.stage(0, [np.array([value])], contribution=contribution, attempt=0, samples=samples)
    order = SumShard(ticket=0, shard=0, server=0, contributions=both)
    assert server.sum(order) == pytest.approx(4.0)  # (3 * 1 + 1 * 5) / 4 = 2
    np.testing.assert_allclose(server.apply(applying(*both, squared_norm=4.0)), [-0.5])


@pytest.mark.parametrize("members", [(0,), (0, 1), (0, 1, 2), (0, 2), (1, 4)])
def test_members_divide_every_batch_without_gap_or_overlap(members: tuple[int, ...]) -> None:
    course = Course(samples=23, batch_size=8, seed=3, speeds=(1.0, 2.0, 0.5))
    seen = torch.cat([course.share(round_=r, worker=w, members=members) for r in range(3) for w in members])
    assert sorted(seen.tolist()) == list(range(23))
    again = torch.cat([course.share(round_=3, worker=w, members=members) for w in members])
    assert not torch.equal(again, seen[:8]), "the next epoch has another order"


def test_the_largest_seed_has_a_next_epoch() -> None:
    course = Course(samples=4, batch_size=2, seed=2**64 - 1)
    epochs = [torch.cat([course.share(round_=r, worker=0, members=(0,)) for r in (epoch, epoch + 1)]) for epoch in (0, 2, 4)]
    assert [sorted(epoch.tolist()) for epoch in epochs] == [[0, 1, 2, 3]] * 3


def test_shards_are_as_long_as_each_other() -> None:
    assert [stretch.stop - stretch.start for stretch in cut(10, shards=3)] == [3, 3, 4]


def test_a_corrupt_checkpoint_gives_the_one_before_and_says_so(tmp_path: Path) -> None:
    snapshot = {"parameters": np.arange(4.0), "count": np.array([1])}
    for version in (1, 2, 3):
        saved = Saved(version=version, clocks=((0, version),))
        checkpoints.write(tmp_path, [snapshot], saved=saved, terms={"seed": 0})
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
    file = tmp_path / "step-00000003" / "shard-0000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    stored = checkpoints.read(tmp_path)
    assert stored.saved == Saved(version=2, clocks=((0, 2),))
    assert "SHA-256 should be" in stored.problems[0]
    np.testing.assert_array_equal(stored.snapshots[0]["parameters"], np.arange(4.0))
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        checkpoints.read(tmp_path, up_to=1)


def test_checkpoints_fit_another_number_of_shards() -> None:
    parts = [{"parameters": np.array(values), "count": np.array([5])} for values in ([0.0, 1.0], [2.0, 3.0, 4.0])]
    again = checkpoints.recut(parts, stretches=cut(5, shards=1))
    np.testing.assert_array_equal(again[0]["parameters"], np.arange(5.0))
    assert again[0]["count"] == [5]


def test_dalys_interval() -> None:
    assert daly_s(write_s=8, mtbf_s=9460.8) == pytest.approx(math.sqrt(2 * 8 * 9460.8), rel=0.03)
    assert daly_s(write_s=100, mtbf_s=40) == 40
    recovery = Checkpoint(every="daly", mtbf_s=94_608_000)
    assert recovery.interval(write_s=8.0, round_s=143.0, workers=10_000) == 3
    assert recovery.interval(write_s=None, round_s=None, workers=10_000) == 1
    assert Checkpoint(every=5).interval(write_s=1.0, round_s=1.0, workers=1) == 5


def test_what_a_failure_costs_is_what_its_round_took_longer() -> None:
    failure = Failure(at_s=4.0, who="worker 1", process=1, how="died", silent_s=0.1, round=2)
    report = with_costs(RunReport(recovery="ignore", reached_s=(0.0, 3.0, 4.0, 7.5, 8.5, 9.5), failures=(failure,)))
    assert report.failures[0].lost_s == pytest.approx(2.5)


def test_reports_are_kept(tmp_path: Path) -> None:
    failure = Failure(at_s=4.0, who="worker 1", process=1, how="died", silent_s=0.1, round=2, lost_s=1.0)
    report = RunReport(recovery="ignore", reached_s=(0.0, 3.0), losses=(1.0,), failures=(failure,), warnings=("w",))
    report.save(tmp_path / "run.json")
    assert RunReport.load(tmp_path / "run.json") == report
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(InputError, match="is not a report"):
        RunReport.load(tmp_path / "bad.json")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"servers": 99}, "99 servers, but only 4 parameters"),
        ({"replicas": 3}, "replicas=3, but there are only 2 servers"),
        ({"workers": 0}, "workers must be at least 1"),
        ({"workers": 5000}, "5000 workers, 2 servers and 1 spares are 5003 processes; a run has at most 4096"),
        ({"min_workers": 9}, "min_workers=9"),
        ({"speeds": [1.0]}, "1 speeds for 4 workers"),
        ({"recovery": Checkpoint()}, "directory"),
        ({"save_every": 1}, "directory"),
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"heartbeat_s": 0.0}, "heartbeat_s"),
        ({"dataset": (X, Y[:3])}, "8 inputs but 3 targets"),
        ({"dataset": (X[:0], Y[:0])}, "empty"),
        ({"directory": "/proc/nowhere"}, "cannot be written"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(arguments: dict[str, object], words: str) -> None:
    pytest.importorskip("ray")
    with pytest.raises(InputError, match=words):
        train_with(lambda: nn.Linear(3, 1), nn.MSELoss(), **{"dataset": (X, Y), "rounds": 1} | arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Checkpoint(every=0),
        lambda: Checkpoint(every="often"),  # type: ignore[arg-type]
        lambda: Checkpoint(mtbf_s=0),
        lambda: SSP(staleness=-1),
        lambda: Backup(workers=0),
        lambda: SGD(lr=0),
        lambda: SGD(lr=math.nan),
        lambda: SGD(lr=math.inf),
        lambda: SGD(lr=1, momentum=math.nan),
        lambda: Adam(eps=math.inf),
        lambda: Adam(betas=(math.nan, 0.9)),
        lambda: Checkpoint(mtbf_s=math.inf),
        lambda: RunSettings(rounds=1, seed=-1),
        lambda: RunSettings(rounds=1, seed=2**64),
        lambda: RunSettings(rounds=1, clip_norm=math.nan),
        lambda: RunSettings(rounds=1, heartbeat_s=math.inf),
        lambda: SGD(lr=1, momentum=1),
        lambda: Adam(lr=-1),
        lambda: Adam(betas=(1.0, 0.9)),
        lambda: RunSettings(rounds=1, consistency=BSP(), save_every=0),
        lambda: RunSettings(rounds=-1),
    ],
)
def test_settings_that_cannot_be(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError):
        make()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Tanh(), "no parameters"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), "float32, torch.float64"),
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "1 .BatchNorm1d. keeps running statistics"),
    ],
)
def test_models_that_cannot_be_trained_this_way(model: nn.Module, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        check_model(model)


def test_a_node_that_does_not_answer_is_not_one_to_start_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    from tatami.engine.nodes import Nodes, choose_node

    def node(name: str, port: int) -> dict[str, object]:
        return {"NodeID": name, "Alive": True, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}

    now_s = [0.0]
    nodes = Nodes(now_s=lambda: now_s[0])
    with socket.create_server(("127.0.0.1", 0)) as there, socket.create_server(("127.0.0.1", 0)) as too:
        ports = [each.getsockname()[1] for each in (there, too)]
        with socket.create_server(("127.0.0.1", 0)) as gone:
            closed = gone.getsockname()[1]
        listed = [node("gone", closed), node("there", ports[0]), node("too", ports[1])]
        monkeypatch.setattr(ray, "nodes", lambda: listed)
        assert nodes.sound() == ["there", "too"], "Ray still believes in the first"
        nodes.note_death("there")
        assert nodes.sound() == ["too"]
        nodes.note_death("too")
        assert nodes.sound() == ["there", "too"], "somewhere it must be"
        free = Nodes(now_s=lambda: now_s[0], shuns=False)
        free.note_death("there")
        assert free.sound() == ["too", "there"]
        assert choose_node(free.sound(), taken=["too"]) == "there", "a process has a node of its own, where there is one"
        assert choose_node(free.sound(), taken=[]) == "too"
        now_s[0] = 60.0
        assert nodes.sound() == ["there", "too"]
    monkeypatch.setattr(ray, "nodes", lambda: [node("gone", closed), node("gone too", closed)])
    assert nodes.alive() == ["gone", "gone too"], "where nobody answers, it is this process that is away"


def _run(path: Path) -> Ledger:
    """From version 7: three rounds, worker 1 missing in the second, where it died; each is told twice, and counted once."""
    ledger = Ledger(recovery="ignore", start=7, sinks=[Records(path)])
    ledger.began(workers=2, startup_s=3.0)
    for round_, at_s in ((7, 1.0), (8, 4.0), (9, 5.0)):
        present = (0,) if round_ == 8 else (0, 1)
        for worker in present:
            outcome = TaskOutcome(loss=float(round_ + worker), samples=10 * (worker + 1), received=())
            ledger.worked(worker=worker, round=round_, outcome=outcome)
        if round_ == 8:
            ledger.failed(Failure(at_s=2.5, who="worker 1", process=1, how="died", silent_s=0.5, round=8))
        ledger.applies(round_ + 1, [Contribution(worker=worker, process=worker, round=round_) for worker in present])
        assert ledger.reached(round_ + 1, at_s=at_s)
        assert not ledger.reached(round_ + 1, at_s=at_s + 0.5)
    return ledger


def test_a_report_has_rounds_losses_and_what_a_failure_cost(tmp_path: Path) -> None:
    report = _run(tmp_path / "run.jsonl").report(workers=2)
    assert report.reached_s == (0.0, 1.0, 4.0, 5.0)
    assert report.losses == pytest.approx((7 + 20 / 30, 8, 9 + 20 / 30))
    assert [failure.lost_s for failure in report.failures] == [2.0]  # 3 s for a round that takes 1 s
    assert (report.start, report.rounds, report.workers, report.startup_s, report.recovery) == (7, 10, 2, 3.0, "ignore")


def test_all_is_written_down_as_it_happens(tmp_path: Path) -> None:
    ledger = _run(tmp_path / "run.jsonl")
    with pytest.warns(UserWarning, match="no room"):
        ledger.warn("no room", version=10)
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(line["event"], line["iteration"]) for line in lines] == [
        ("round", 8),
        ("failure", 8),
        ("round", 9),
        ("round", 10),
        ("warning", 10),
    ]
    assert {"updates": 1, "samples": 10, "loss": 8.0, "at_s": 4.0}.items() <= lines[2].items()
    assert {"who": "worker 1", "how": "died", "silent_s": 0.5}.items() <= lines[1].items()
    assert ledger.report(workers=2).warnings == ("no room",)


def test_the_last_loss_that_is_not_finite_is_named(tmp_path: Path) -> None:
    ledger = _run(tmp_path / "run.jsonl")
    for worker, round_ in ((1, 11), (0, 10)):
        ledger.worked(worker=worker, round=round_, outcome=TaskOutcome(loss=math.nan, samples=1, received=()))
    assert ledger.last_not_finite() == (1, 11)
