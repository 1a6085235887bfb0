"""Optimizers that look at more than one element are found by trying them; sharded ones step as whole ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from equal_runs import plain_fit
from torch import nn

import tatami
from drawing import Written, one_at_a_time
from tatami.cluster import Cluster, Processor
from tatami.comm import AbstractCommunicator
from tatami.errors import InputError, MemoryLackError, ModelError, PlanError
from tatami.retiling import Retiler
from tatami.runtime.optimizers import check_optimizer
from tatami.tiling import Layout, StagedLayout, plan
from tatami.tiling.memory import memory_bytes
from tatami.tiling.sharding import rounds_of, shard_bounds, shard_shares, with_even_part
from tatami.train import Retiling, TiledModel, Trainer, move, tile, whole_state_dict
from tatami.workload import Workload
from tiled_rig import WithUnused, assert_close, simple_layout, staged

ELEMENTWISE = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")


class Own(torch.optim.Optimizer):
    """A user's: each parameter goes against what `direction` makes of its gradient."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def direction(self, grad: torch.Tensor) -> torch.Tensor:
        return grad.sign()  # as Lion's

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * self.direction(parameter.grad)


class ByNorm(Own):
    """As LARS: the step depends on the norm of the whole weight's gradient."""

    def direction(self, grad: torch.Tensor) -> Any:
        return grad / grad.norm()


class ByRow(Own):
    def direction(self, grad: torch.Tensor) -> Any:
        return grad / grad.norm(dim=1, keepdim=True)


class Noisy(Own):
    """Every rank would draw noise of its own for what all ranks hold."""

    def direction(self, grad: torch.Tensor) -> torch.Tensor:
        return grad + torch.randn_like(grad)


class Sometimes(Own):
    """As ByNorm for some weights only: those of groups that say so, of convolutions, or of many elements."""

    def __init__(self, params: Iterable[Any], adapts: str = "") -> None:
        super().__init__(params)
        for group in self.param_groups:
            group.setdefault("adapts", adapts)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for each in group["params"]:
                adapted = {"": False, "all": True, "4-d": each.ndim == 4, "large": each.numel() >= 4096}[group["adapts"]]
                each -= 0.1 * each.grad / (each.grad.norm() if adapted else 1.0)


class Called(Own):
    """Its settings are attributes, and arguments that no default has."""

    def __init__(self, params: Iterable[Any], rate: float, adapts: Any) -> None:
        super().__init__(params, lr=rate)
        self.adapts = adapts

    def direction(self, grad: torch.Tensor) -> Any:
        return grad / grad.norm() if self.adapts else grad


class WithClosure(Own):
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is not None
        closure()


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 5))]


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("settings", [{}, {"lr": 0.0}, {"foreach": True}, {"weight_decay": 0.1}, {"maximize": True}])
def test_those_of_torch_that_work_element_by_element_are_taken(name: str, settings: dict[str, Any]) -> None:
    kind = getattr(torch.optim, name)
    if name == "Rprop" and "weight_decay" in settings:
        settings = {}  # it has none
    check_optimizer(kind(weights(), **settings))


@pytest.mark.parametrize("make", [Own, Sometimes, partial(Called, rate=0.1, adapts=False)])
def test_own_ones_are_taken_where_they_do(make: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_optimizer(make(weights()))


@pytest.mark.parametrize("make", [WithClosure, partial(Called, rate=0.1, adapts=[])])
def test_what_cannot_be_tried_is_taken_with_a_warning_once(make: Any) -> None:
    optimizer = make(weights())
    with pytest.warns(UserWarning, match="element by element could not be tried on a small weight"):
        check_optimizer(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_optimizer(optimizer)


def test_an_optimizer_is_tried_with_the_settings_of_each_group_and_on_several_weights() -> None:
    for adapts in ("all", "4-d", "large"):
        optimizer = Sometimes([{"params": weights()}, {"params": weights(), "adapts": adapts, "initial_lr": 0.1}])
        with pytest.raises(ModelError, match="Sometimes does not work element by element"):
            check_optimizer(optimizer)
    with pytest.raises(ModelError, match="Called does not work element by element"):
        check_optimizer(Called(weights(), 0.1, adapts=True))
    optimizer = Sometimes(weights())
    check_optimizer(optimizer)
    optimizer.add_param_group({"params": weights(), "adapts": "all"})
    with pytest.raises(ModelError, match="Sometimes does not work element by element"):
        check_optimizer(optimizer)


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Muon, ByNorm, ByRow, Noisy])
@pytest.mark.parametrize("lr", [0.0, 0.3])
def test_others_are_refused_whatever_they_are_called(kind: Any, lr: float) -> None:
    renamed = type("Renamed", (kind,), {})
    with pytest.raises(ModelError, match="Renamed does not work element by element"):
        check_optimizer(renamed(weights(), lr=lr))


def test_what_is_tried_draws_nothing_from_the_run() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with pytest.raises(ModelError, match="Noisy does not work element by element"):
        check_optimizer(Noisy(weights()))
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.threads_only
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", [ByNorm, torch.optim.LBFGS, torch.optim.Adafactor])
def test_they_are_refused_by_the_trainer_and_in_a_loop(comm: AbstractCommunicator, kind: Any) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    model = tile(net, comm, batch_size=4, speeds="equal", reduction="mean", quiet=True)
    told = f"{kind.__name__} does not work element by element"
    with pytest.raises(ModelError, match=told):
        Trainer(model, optimizer=kind, loss=nn.MSELoss())
    own, taken = kind(model.parameters(), lr=0.1), Own(model.parameters())
    x, y = model.local(torch.ones(4, 3), torch.zeros(4, 2))
    torch.autograd.backward(nn.functional.mse_loss(model(x), y))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step = own.step if kind is ByNorm else partial(own.step, lambda: torch.tensor(1.0))
    for _ in range(2):
        with pytest.raises(ModelError, match=told):
            step()
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    taken.step()
    assert not all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    if kind is not ByNorm:  # of what is not tiled
        kind([nn.Parameter(torch.ones(2, 2))], lr=0.1).step(lambda: torch.tensor(1.0))


WITHOUT_BLOCKS = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


@pytest.mark.ranks(2)
def test_what_couples_weights_is_refused_on_stages_without_blocks(comm: AbstractCommunicator) -> None:
    """It would see those of one stage."""
    given: Any = {"sample": torch.ones(2, 3), "stages": 2, "speeds": "equal", "reduction": "mean", "quiet": True}
    model = tile(WITHOUT_BLOCKS, comm, batch_size=4, **given)
    x, y = model.local(torch.ones(4, 3), torch.zeros(4, 2))
    torch.autograd.backward(nn.functional.mse_loss(model(x), y))
    with pytest.raises(ModelError, match="ByNorm does not work element by element"):
        ByNorm(model.parameters()).step()


SPEEDS = [1.0, 3.0, 0.0625, 2.0]


@one_at_a_time
def network() -> nn.Module:
    torch.manual_seed(0)
    # Without a bias that batch normalization takes away: its gradient is rounding, which Adam divides by itself.
    layers = [nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 7, bias=False), nn.BatchNorm1d(7), nn.Linear(7, 3)]
    built = WithUnused(nn.Sequential(*layers)).double()
    layers[2].weight.requires_grad_(False)
    return built


def train(model: Any, local: Any, clip: Any) -> torch.optim.Optimizer:
    """Groups, two passes for an update, clipping by value and norm, a schedule; a frozen weight is trained in the end.

    The norm is clipped in a hook of the step, which sees whole weights.
    """
    parameters = list(model.parameters())
    groups = [{"params": parameters[:3], "weight_decay": 0.1}, {"params": parameters[3:], "lr": 0.03}]
    optimizer = torch.optim.AdamW(groups, lr=0.02, eps=1e-6)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    norms = cycle((0.3, 0.5))

    def clip_in_step(*_: Any) -> None:
        clip([each for group in optimizer.param_groups for each in group["params"]], next(norms))

    optimizer.register_step_pre_hook(clip_in_step)
    draw = torch.Generator().manual_seed(1)
    for step in range(5):
        if step == 3:
            parameters[2].requires_grad_(True)
        optimizer.zero_grad()
        for size in (11, 9):
            x, y = local(*(torch.randn(size, n, generator=draw, dtype=torch.float64) for n in (4, 3)))
            nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.4)
        optimizer.step()
        schedule.step()
    return optimizer


@pytest.mark.filterwarnings("ignore:timed leaves out")
@pytest.mark.parametrize("own_clip", [False, True])
def test_a_loop_by_hand_is_that_of_one_machine(comm: AbstractCommunicator, own_clip: bool) -> None:
    plain, built = network(), network()
    expected = train(plain, lambda *batch: batch, torch.nn.utils.clip_grad_norm_)
    sizes = [sum(v.numel() for v in state.values() if v.dim()) for state in expected.state.values()]
    given: Any = {"batch_size": 11, "speeds": SPEEDS[: comm.size], "reduction": "mean", "quiet": True}
    model: TiledModel = tile(built, comm, sharded_optimizer=True, **given)
    clip = (lambda _, norm: model.clip_grad_norm_(norm)) if own_clip else torch.nn.utils.clip_grad_norm_
    optimizer = train(model, model.local, clip)
    assert_close(comm.bcast_object(whole_state_dict(model)), plain.state_dict(), what="weights")
    mine = sum(v.numel() for state in optimizer.state.values() for v in state.values() if v.dim())
    assert sum(comm.allgather_object(mine)) == sum(sizes)
    speeds = {name: SPEEDS[int(name[1:])] for name in model.layout.processors}  # p2 may be left out
    assert mine == pytest.approx(sum(sizes) * speeds.get(model.name, 0.0) / sum(speeds.values()), abs=8)
    grads = [each.grad for each in model.parameters() if each.grad is not None]
    here = sum(int(grad.isfinite().sum()) for grad in grads)  # nothing can use a part of a sum as the whole
    assert sum(comm.allgather_object(here)) == sum(grad.numel() for grad in grads)
    if comm.size > 1:
        move(model, simple_layout(*([rank] for rank in range(comm.size))), optimizer=optimizer)
        with pytest.raises(PlanError, match="replicas of several ranks, with which sharded_optimizer=True does not work"):
            move(model, simple_layout(range(comm.size)), optimizer=optimizer)
        model(model.local(torch.ones(11, 4, dtype=torch.float64))).mean().backward()
        for kind, match in ((ByNorm, "does not work element by element"), (WithClosure, "could not be tried")):
            with pytest.raises(ModelError, match=match):
                kind(list(model.parameters())).step()
        with pytest.raises(InputError, match="takes no closure"):
            optimizer.step(lambda: 0.0)
        with pytest.raises(InputError, match="needs replicas of one rank each"):
            tile(built, comm, layout=simple_layout(range(comm.size)), sharded_optimizer=True, **given)
        by_hand = tile(built, comm, sharded_optimizer=True, **given)
        for parameter in by_hand.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with pytest.raises(InputError, match=r"do not set parameter\.grad by hand"):
            torch.optim.SGD(by_hand.parameters(), lr=0.1).step()


class Tied(nn.Module):
    """Its first and last stage share a weight, and a scalar of which one replica has nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.gain = nn.Parameter(torch.ones(()))
        self.up, self.down, self.head = nn.Linear(6, 9), nn.Linear(9, 6), nn.Linear(6, 11)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embedding(x) * self.gain
        y = y + self.down(torch.tanh(self.up(y)))
        result: torch.Tensor = self.head(torch.tanh(y)) * self.gain
        return result


@one_at_a_time
def tied() -> nn.Module:
    torch.manual_seed(0)
    return Tied().double()


def train_tied(model: Any, optimizer: torch.optim.Optimizer, steps: range, parts: Any) -> None:
    """Two batches for an update, and clipping."""
    for step in steps:
        optimizer.zero_grad()
        draw = torch.Generator().manual_seed(step)
        for size in (11, 9):
            for x, y in parts(*(torch.randint(0, 11, (size, 5), generator=draw) for _ in range(2))):
                nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05 if step % 2 else 0.3)
        optimizer.step()


def crossed(layout: StagedLayout) -> StagedLayout:
    """The same with the ranks of the last stage in another order than the replicas have in the first."""
    last, names = layout.stages[-1], layout.stages[-1].processors
    return replace(layout, stages=(*layout.stages[:-1], last.renamed(dict(zip(names, names[::-1], strict=True)))))


def test_stages_are_those_of_one_machine_and_go_on_in_other_layouts(comm: AbstractCommunicator, tmp_path: Path) -> None:
    plain, built = tied(), tied()
    settings: Any = {"lr": 0.02, "eps": 1e-6}
    train_tied(plain, torch.optim.AdamW(plain.parameters(), **settings), range(5), lambda *batch: [batch])
    size = comm.size
    given: Any = {"batch_size": 11, "reduction": "mean", "quiet": True, "sample": torch.zeros(4, 5, dtype=torch.long)}
    given |= {"speeds": SPEEDS[:size]}
    folder = comm.bcast_object(tmp_path)
    each_alone = simple_layout(*([rank] for rank in range(size)))
    laid: list[Layout | StagedLayout] = [each_alone]
    if size > 1:
        laid += [staged(size, stages=2, cuts=(1,), micro_batches=2), crossed(staged(size, stages=2, cuts=(3,)))]
    if size == 3:
        laid.append(staged(3, stages=3, cuts=(1, 2)))

    def begun(layout: Layout | StagedLayout, *, shards: bool) -> tuple[TiledModel, torch.optim.Optimizer]:
        model = tile(built, comm, layout=layout, sharded_optimizer=shards, **given)
        return model, torch.optim.AdamW(model.parameters(), **settings)

    for number, layout in enumerate(laid):
        for shards in (True, False):
            model, optimizer = begun(layout, shards=shards)
            train_tied(model, optimizer, range(3), model.micro_batches)
            tatami.save_training(folder / f"{number}-{shards}", model, optimizer, step=3)
            train_tied(model, optimizer, range(3, 5), model.micro_batches)
            assert_close(comm.bcast_object(whole_state_dict(model)), plain.state_dict(), what=f"{layout}, {shards}")
            if shards and model.stage is not None:
                with pytest.raises(ModelError, match="cannot be moved to, from or between pipeline stages yet"):
                    move(model, each_alone, optimizer=optimizer)
                with pytest.raises(InputError, match="pipeline stages with a sharded optimizer are not re-tiled yet"):
                    Retiling(model, optimizer, retiler=Retiler())
            if model.sharding is not None and model.stage is not None:
                mine = sum(v.numel() for state in optimizer.state.values() for v in state.values() if v.dim())
                assert model.stage.plan is not None
                elements = sum(each.numel() for each in model.own_parameters() if each.dim())
                assert mine == pytest.approx(2 * elements * model.stage.plan.optimizer_shares[model.name], abs=8)
                assert sum(model.stage_comm.allgather_object(mine)) == 2 * elements
            model.close()
    for shards in (True, False):
        for number, saved in enumerate(laid):
            resumed, optimizer = begun(laid[(number + 1) % len(laid)], shards=not shards or len(laid) == 1)
            assert tatami.load_training(folder / f"{number}-{shards}", resumed, optimizer) is not None
            train_tied(resumed, optimizer, range(3, 5), resumed.micro_batches)
            what = f"{saved} after {laid[(number + 1) % len(laid)]}, sharded: {shards}"
            assert_close(comm.bcast_object(whole_state_dict(resumed)), plain.state_dict(), what=what)
            resumed.close()


@pytest.mark.threads_only
@pytest.mark.ranks(4)
def test_rounded_gradients_keep_a_tied_weight_the_same_on_all_stages(comm: AbstractCommunicator) -> None:
    given: Any = {"batch_size": 11, "reduction": "mean", "quiet": True, "sample": torch.zeros(4, 5, dtype=torch.long)}
    for shards in (True, False):
        laid = staged(comm.size, stages=2, cuts=(1,))
        model = tile(tied(), comm, layout=laid, speeds="equal", wire="bfloat16", sharded_optimizer=shards, **given)
        train_tied(model, torch.optim.AdamW(model.parameters(), lr=0.02), range(3), model.micro_batches)
        named = dict(model.module.named_parameters())
        first, *others = comm.allgather_object(named["embedding.weight"].detach().clone())
        assert all(torch.equal(first, each) for each in others)


def test_shares_follow_speed_within_memory_and_predictions_count_them() -> None:
    inf = float("inf")
    assert shard_shares([1, 3], rooms_bytes=[inf, inf], size_bytes=8) == (0.25, 0.75)
    assert shard_shares([1, 3, 4], rooms_bytes=[inf, 1, inf], size_bytes=8) == pytest.approx((0.175, 0.125, 0.7))
    assert shard_shares([1, 3], rooms_bytes=[1, 3], size_bytes=8) == (0.25, 0.75)  # too little for all
    bounds = shard_bounds([5, 0, 7], [0.5, 0.0, 0.5])
    assert bounds == [(0, 5, 5, 5), (0, 0, 0, 0), (0, 1, 1, 7)]
    rounds = rounds_of([tuple(pairwise(each)) for each in bounds], rounds=4)
    taken = sorted((index, at) for each in rounds for own in each for index, start, stop in own for at in range(start, stop))
    assert taken == [*((0, at) for at in range(5)), *((2, at) for at in range(7))]
    assert with_even_part([0.1, 0.9], 0.4) == pytest.approx((0.2, 0.8))  # half of 0.4 at least
    assert with_even_part([0.3, 0.7], 0.4) == pytest.approx((0.3, 0.7))
    assert with_even_part([0.5, 0.5], 1.0) == (0.5, 0.5)
    memories = {"p0": 75_000, "p1": 10**9}
    cluster = Cluster(processors=tuple(Processor(name=name, speed=1.0, memory_bytes=own) for name, own in memories.items()))
    work = Workload(samples=2, replicated_parameters=3000, replicated_flop_per_sample=1, sharded_bytes_per_parameter=12.0)
    layout = simple_layout([0], [1])
    whole = 3000 * (8 + 4 * 4)  # weights, gradients, and messages of two rounds
    kept = memory_bytes(layout, workload=work, cluster=cluster)
    assert kept == pytest.approx({"p0": 74_999, "p1": whole + 12 * 3000 - 2999})  # a byte is left for rounding


def test_a_plan_without_room_says_what_each_rank_would_keep_with_shards() -> None:
    work = Workload(
        samples=40, replicated_parameters=10**7, replicated_flop_per_sample=10**8, replicated_activation_bytes=10**6
    )
    memories = (150 * 10**6, 170 * 10**6, 190 * 10**6)
    cluster = Cluster(
        processors=tuple(Processor(name=f"p{rank}", speed=1.0 + rank, memory_bytes=own) for rank, own in enumerate(memories))
    )
    with pytest.raises(MemoryLackError) as caught:
        plan(cluster=cluster, workload=work)
    sharded = plan(cluster=cluster, workload=work.with_sharded_optimizer)
    kept = sharded.memory_bytes
    assert all(own <= given for own, given in zip(kept.values(), memories, strict=True))
    assert caught.value.fits_sharded
    told = str(caught.value)
    assert "shared out among the ranks, tatami.tile(sharded_optimizer=True): p0 would keep" in told
    tight = Cluster(processors=tuple(replace(each, memory_bytes=140 * 10**6) for each in cluster.processors))
    found = plan(cluster=tight, workload=work.with_sharded_optimizer)
    assert [replica.micro_batches for replica in found.layout.replicas] == [4, 4, 4]  # the shards fill what is left
    assert 139 * 10**6 < max(found.memory_bytes.values()) <= 140 * 10**6


def tables_forward(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Large tables, in which few rows are looked up."""
    result: torch.Tensor = net.last(torch.stack([table(x) for table in net.tables]).sum(0))
    return result


@one_at_a_time
def tables() -> nn.Module:
    torch.manual_seed(0)
    return Written(
        tables_forward, tables=nn.ModuleList(nn.Embedding(7_500, 40) for _ in range(8)), last=nn.Linear(40, 2)
    ).double()


@pytest.mark.filterwarnings("ignore:timed leaves out")
def test_a_trainer_shards_where_there_is_no_room_otherwise(comm: AbstractCommunicator) -> None:
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randint(0, 7_500, (16,), generator=draw), torch.randn(16, 2, generator=draw, dtype=torch.float64)
    plain, built = tables(), tables()
    make = partial(torch.optim.AdamW, lr=0.02)
    batches = [(x, y)] * 3
    expected = plain_fit(plain, batches, loss=lambda m, b: nn.functional.mse_loss(m(b[0]), b[1]), optimizer=make, clip_norm=0.5)
    elements = sum(each.numel() for each in plain.parameters())
    processors = (Processor(name=f"p{rank}", speed=1.0 + rank, memory_bytes=39 * elements) for rank in range(comm.size))
    cluster = Cluster(processors=tuple(processors))

    def trainer(make: Any, **given: Any) -> Trainer:
        own = partial(tile, speeds=cluster, planner="weighted", **given)
        return Trainer(built, comm=comm, tile=own, optimizer=make, loss=nn.MSELoss(), gradient_clip_val=0.5)

    fitting = trainer(make)
    for refused in (trainer(make, sharded_optimizer=False), trainer(ByNorm), *([fitting] if comm.size == 1 else [])):
        with pytest.raises(MemoryLackError, match="weighted finds no room"):
            refused.fit((x, y), batch_size=16, epochs=1)
    if comm.size > 1:
        losses = fitting.fit((x, y), batch_size=16, epochs=3).losses
        assert losses == pytest.approx(expected[0], rel=1e-10)
        assert_close(comm.bcast_object(whole_state_dict(fitting.model)), expected[1], what="weights")
        kept = sum(v.numel() for state in fitting.optimizer.state.values() for v in state.values() if v.dim())
        assert sum(comm.allgather_object(kept)) == 2 * elements
