"""Networks that change themselves, or look at their batch or weights in odd ways: exact as they come, or refused by name."""

import copy
import itertools
import random
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from equal_runs import check_case, check_equal, check_loop, loss_of, random_layout
from networks import Case, Fused, build, reals
from torch import nn

import tatami
from drawing import Written, one_at_a_time
from tatami.comm import AbstractCommunicator
from tatami.errors import InputError, ModelError
from tatami.model.describing import describe
from tatami.testing.worlds import World
from tatami.tiling import Layout, Replica
from tatami.train import find_blocks, tile, workload_of
from tiled_rig import assert_close, simple_layout

pytestmark = [pytest.mark.ranks(2), pytest.mark.threads_only]

Forward = Callable[..., Any]


def paired(forward: Forward, **parts: Any) -> Written:
    return Written(forward, pair=nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)), **parts)


def moving_mean(net: Any, x: torch.Tensor) -> Any:
    if net.training:
        net.mean = 0.5 * net.mean + 0.5 * x.detach().mean(0)
    return net.pair(x - net.mean)


def moving_mean_in_place(net: Any, x: torch.Tensor) -> Any:
    net.mean.mul_(0.5).add_(0.5 * x.detach().mean(0))
    return net.pair(x)


def remembering(net: Any, x: torch.Tensor) -> Any:
    before = getattr(net, "last", 0.0)
    net.last = x.detach().sum()
    return net.pair(x) + 0.1 * before


def clamped(net: Any, x: torch.Tensor) -> Any:
    net.pair[0].weight.data.clamp_(-0.1, 0.1)
    return net.pair(x)


def balanced(net: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    shares = net.pair(x).softmax(-1)
    return {"loss": shares.square().mean() + shares.mean(0).square().sum()}


def balanced_for_two_at_least(net: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    if len(x) == 1:
        raise ValueError("a single sample is not enough")
    return balanced(net, x)


def varying(net: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = net.pair(x)
    return h, torch.relu(1 - h.std(0)).mean()  # not a number for a single sample


def keeping_a_mean(net: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = net.pair(x)
    net.kept = result.abs().sum(1).mean()
    return result


def keeping_a_sum(net: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = net.pair(x)
    net.kept = result.abs().sum()
    return result


@pytest.mark.parametrize(
    ("forward", "match"),
    [
        (moving_mean, "what Written gives for a sample depends on the other samples of the batch"),
        (moving_mean_in_place, r"keeps something of its samples for later \(mean\)"),
        (remembering, r"keeps something of its samples for later \(last\)"),
        (clamped, r"changes weights \(pair.0.weight\).* between two steps"),
        (lambda net, x: net.pair(x) if random.random() < 0.5 else x, "draws from Python's random.* Draw with torch"),
        (balanced, r"a loss that is neither the mean nor the sum of what its samples give.* by model\.over_batch\("),
        (balanced_for_two_at_least, "a loss that is neither the mean nor the sum of what its samples give"),
        (varying, "a loss that is neither the mean nor the sum of what its samples give"),
        (
            lambda net, x: ((h := net.pair(x)), torch.pdist(h).mean()),
            "a loss that is neither the mean nor the sum of what its samples give",
        ),
        (lambda net, x: net.pair(x) @ x.T, "has the samples of the batch on two axes"),
        (lambda net, x: torch.eye(4) @ net.pair(x), "runs on 4 samples but not on 3.* must be that of independent samples"),
    ],
)
def test_a_forward_pass_that_ranks_could_not_share_is_refused_and_nothing_is_left_of_it(forward: Forward, match: str) -> None:
    torch.manual_seed(0)
    model = paired(forward, mean=torch.zeros(6))
    state, mean = copy.deepcopy(model.state_dict()), model.get_buffer("mean")
    names = set(vars(model))
    with pytest.raises(ModelError, match=match):
        find_blocks(model, sample=torch.randn(4, 6))
    assert model.get_buffer("mean") is mean
    assert set(vars(model)) == names
    if forward is not clamped:  # which torch.fx has run
        assert_close(model.state_dict(), state, what="after it was refused")


@pytest.mark.parametrize(("forward", "fits", "other"), [(keeping_a_mean, "mean", "sum"), (keeping_a_sum, "sum", "mean")])
def test_a_number_that_is_kept_must_be_what_the_reduction_says(
    comm: AbstractCommunicator, forward: Forward, fits: Any, other: Any
) -> None:
    torch.manual_seed(0)
    model = paired(forward)
    with pytest.raises(ModelError, match=f"is the {fits} of what its samples give, and the reduction is '{other}'"):
        tatami.tile(model, comm, batch_size=8, sample=torch.ones(4, 6), speeds="equal", reduction=other)
    tiled = tatami.tile(model, comm, batch_size=8, sample=torch.ones(4, 6), speeds="equal", reduction=fits)
    with pytest.raises(ModelError, match=f"the reduction is '{other}'"):
        tiled.reduction = other


@pytest.mark.parametrize("forward", [moving_mean, moving_mean_in_place])
def test_without_a_sample_batch_what_is_kept_of_samples_is_seen_as_well(forward: Forward) -> None:
    model = paired(forward, mean=torch.zeros(6))
    with pytest.raises(ModelError, match=r"keeps something of its samples for later \(mean\)"):
        tatami.plan(model, speeds=[1, 1], batch_size=4)
    assert type(model.get_buffer("mean")) is torch.Tensor
    assert not model.get_buffer("mean").any()


class CountingHeads(nn.Module):
    """Attention that counts its passes in a buffer, and computes with it."""

    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        if self.training:
            self.steps += 1
        q, k, v = self.qkv(x).view(x.shape[0], x.shape[1], 3, 3, 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return self.out(y) / (1 + 0.1 * self.steps)


class Beside(nn.Module):
    """Attention and a perceptron beside each other, of the same norm, which has a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = self.same = nn.LayerNorm(12)
        self.qkv, self.out, self.up, self.down = nn.Linear(12, 36), nn.Linear(12, 12), nn.Linear(12, 10), nn.Linear(10, 12)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.same(x)
        q, k, v = self.qkv(h).view(x.shape[0], x.shape[1], 3, 3, 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        return x + self.out(y) + self.down(F.gelu(self.up(h)))


def summed_forward(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Attention in Einstein's notation, whose last weight has an axis of heads and one of their elements."""
    q, k, v = (each(x).view(x.shape[0], x.shape[1], 3, 4) for each in (net.q, net.k, net.v))
    weights = torch.einsum("b i h d, b j h d -> b h i j", q, k).softmax(-1)
    return x + torch.einsum("bihd,hdo->bio", torch.einsum("bhij,bjhd->bihd", weights, v), net.out)


def viewed() -> nn.Module:
    """Convolutions on images that come as rows, with the views that torch's own examples have."""

    def forward(net: Any, x: torch.Tensor) -> Any:
        h = torch.relu(net.b(torch.relu(net.a(x.view(-1, 1, 6, 6)))))
        return net.d(torch.relu(net.c(h.view(-1, 16))))

    return Written(forward, a=nn.Conv2d(1, 6, 3), b=nn.Conv2d(6, 4, 3), c=nn.Linear(16, 9), d=nn.Linear(9, 3))


def mirrored(net: Any, x: torch.Tensor) -> Any:
    """An activation and its mirror image beside each other; each hidden unit is on two places of the layer after it."""
    h = net.a(x)
    return net.b(torch.cat((torch.relu(h), torch.relu(-h)), dim=-1))


def two_branches(net: Any, x: torch.Tensor) -> Any:
    """Hidden units of two kinds from one layer, by slices; half as many of one as of the other."""
    h = net.up(x)
    return net.one(torch.tanh(h[..., :4])) * 2 + net.two(torch.relu(h[..., 4:]))


def biaffine() -> nn.Module:
    """Products of two tensors: of two layers' results, of one with itself, and at the end, where nothing sums over them."""

    def forward(net: Any, x: torch.Tensor) -> Any:
        h = net.mixed(torch.tanh(net.both(torch.relu(net.a(x)), torch.relu(net.b(x)))))
        return net.last(net.narrow(F.gelu(net.square(h, h))), x)

    first = {"a": nn.Linear(6, 5), "b": nn.Linear(6, 4), "both": nn.Bilinear(5, 4, 7), "mixed": nn.Linear(7, 3)}
    square = nn.Bilinear(3, 3, 8, bias=False)
    return Written(forward, **first, square=square, narrow=nn.Linear(8, 5), last=nn.Bilinear(5, 6, 3))


def packed(net: Any, x: torch.Tensor) -> Any:
    """A recurrent layer that skips what is behind the length of each sample."""
    lengths = (x[..., 0] > 0).sum(1).clamp(min=1)
    rows = nn.utils.rnn.pack_padded_sequence(net.pair(x), lengths, batch_first=True, enforce_sorted=False)
    return nn.utils.rnn.pad_packed_sequence(net.layer(rows)[0], batch_first=True, total_length=x.shape[1])[0]


ODD = {
    "packed": Case(
        build=lambda: paired(packed, layer=nn.GRU(6, 5, batch_first=True)), draw=reals(7, 6), blocks=("linear pair",)
    ),
    "biaffine": Case(build=biaffine, draw=reals(2, 6), blocks=("linear pair", "linear pair")),
    "fused": Case(build=lambda: Fused(hidden=6, bias=True), draw=reals(5, 12), blocks=("attention with perceptron",)),
    "mirrored": Case(
        build=lambda: Written(mirrored, a=nn.Linear(6, 5), b=nn.Linear(10, 3)), draw=reals(6), blocks=("linear pair",)
    ),
    "two branches": Case(
        build=lambda: Written(two_branches, up=nn.Linear(6, 12), one=nn.Linear(4, 3), two=nn.Linear(8, 3)),
        draw=reals(2, 6),
        blocks=("linear pair",),
    ),
    # Nothing sums over units, and there is no other layer.
    "bilinear alone": Case(
        build=lambda: Written(lambda net, x: net.layer(x, x.flip(-1)), layer=nn.Bilinear(6, 6, 4)), draw=reals(6), blocks=()
    ),
    "beside": Case(build=Beside, draw=reals(5, 12), blocks=("attention", "linear pair")),
    # A gate of torch's own between convolutions.
    "gated": Case(
        build=lambda: Written(
            lambda net, x: x + net.b(F.glu(net.a(x), 1)), a=nn.Conv1d(4, 10, 3, padding=1), b=nn.Conv1d(5, 4, 1)
        ),
        draw=reals(4, 7),
        blocks=("convolution pair",),
    ),
    "summed": Case(
        build=lambda: Written(
            summed_forward,
            q=nn.Linear(12, 12, bias=False),
            k=nn.Linear(12, 12, bias=False),
            v=nn.Linear(12, 12),
            out=nn.Parameter(torch.randn(3, 4, 12) / 4),
        ),
        draw=reals(5, 12),
        blocks=("attention",),
    ),
    "counting heads": Case(build=CountingHeads, draw=reals(5, 12), blocks=("attention",)),
    "viewed": Case(build=viewed, draw=reals(36), blocks=("convolution pair", "linear pair")),
}


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", sorted(ODD))
def test_odd_networks_are_split_and_exact(world: World, name: str) -> None:
    found = find_blocks(build(ODD[name]), sample=ODD[name].draw(4, torch.Generator().manual_seed(1)))
    assert tuple(block.facts.kind for block in found.blocks) == ODD[name].blocks
    check_case(world, ODD[name])


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", sorted(ODD))
def test_a_rank_that_has_all_units_sums_with_those_of_its_replica_that_have_none(world: World, name: str) -> None:
    def layouts(size: int) -> list[Layout]:
        uneven = Replica(width=0.5, processors=("p0", "p1"), heights=(0.98, 0.02))
        others = tuple(Replica(width=0.5, processors=(f"p{rank}",), heights=(1.0,)) for rank in range(2, size))
        return [Layout(replicas=(uneven, *others) if others else (replace(uneven, width=1.0),))]

    check_once(world, partial(build, ODD[name]), drawn(ODD[name]), layouts=layouts)


def drawn(case: Case) -> torch.Tensor:
    (x,) = case.draw(4, torch.Generator().manual_seed(1))
    assert isinstance(x, torch.Tensor)
    return x


def check_once(
    world: World,
    make: Callable[[], nn.Module],
    x: torch.Tensor,
    *,
    loss: Callable[[nn.Module, Any], torch.Tensor] = lambda _, output: loss_of(output),
    layouts: Callable[[int], list[Layout]],
) -> None:
    """The gradients of a pass over these samples are those of the plain network; `loss`: of the network and its output."""

    def loop(model: Any, local: Callable[..., Any]) -> None:
        output = model(local(x))
        loss(getattr(model, "module", model), output).backward()  # type: ignore[no-untyped-call]

    check_loop(world, one_at_a_time(make), loop, layouts=layouts, batch_size=len(x), sample=x)


def trained_alike(world: World, make: Callable[[], nn.Module], loss_of: Callable[[nn.Module, Any], torch.Tensor]) -> None:
    """The gradients of a pass over 6 samples, on replicas of uneven widths, are those of the plain network."""
    x = torch.rand(6, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    layout = simple_layout([0], list(range(1, world.size)), widths=[0.34, 0.66])
    check_once(world, make, x, loss=loss_of, layouts=lambda _: [layout])


def written(forward: Forward) -> nn.Module:
    torch.manual_seed(0)
    return paired(forward).double()


@pytest.mark.ranks(3)
def test_a_penalty_on_weights_that_could_be_split_counts_all_of_them(world: World) -> None:
    def forward(net: Any, x: torch.Tensor) -> Any:
        assert float(x.detach().sum()) < 1e9  # which torch.fx cannot follow: the pair is found in its Sequential
        return net.pair(x).square().mean() + sum(parameter.norm() for parameter in net.parameters())

    trained_alike(world, lambda: written(forward), lambda _, output: output)


@pytest.mark.ranks(3)
def test_a_loss_that_is_kept_in_the_network_is_weighed_like_its_result(world: World) -> None:
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = net.pair(x)
        net.extra = h.square().mean()
        return h

    trained_alike(world, lambda: written(forward), lambda net, output: output.mean() + net.extra)


@pytest.mark.ranks(3)
def test_a_network_that_has_run_before_can_be_tiled_with_what_it_holds(world: World) -> None:
    """As those with torch's older weight normalization, which keeps the weight that it computed, with its history."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 2)).double()

    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(make())
    trained_alike(world, make, lambda _, output: output.square().mean())


@pytest.mark.ranks(1)
def test_what_cannot_be_copied_is_named(comm: AbstractCommunicator) -> None:
    class Locked(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("cannot pickle a lock")

    with pytest.raises(InputError, match=r"cannot be copied.*TypeError: cannot pickle a lock"):
        tile(Locked(2, 2), comm, batch_size=2, speeds="equal")


def test_lengths_for_which_a_split_module_would_take_another_branch_are_refused(world: World) -> None:
    def forward(net: Any, x: torch.Tensor) -> Any:
        h = torch.relu(net.a(x))
        return net.b(h if x.shape[1] > 4 else 2 * h)

    model, sample = Written(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 6)), torch.rand(4, 6, 6)

    def body(comm: AbstractCommunicator) -> None:
        tiled = tile(model, comm, batch_size=4, sample=sample, speeds="equal", layout=simple_layout([0, 1]), quiet=True)
        assert tiled(tiled.local(sample[:3, :5])).shape == (3, 5, 6)
        with pytest.raises(ModelError, match=r"lengths of which inputs\[0\].size\(\)\[1\] > 4 is true.* \(3, 4, 6\)"):
            tiled(tiled.local(sample[:3, :4]))

    world(body)


def asking(net: Any, h: torch.Tensor) -> Any:  # noqa: ARG001
    return h if torch.is_grad_enabled() else 2 * h


def looking(net: Any, h: torch.Tensor) -> Any:  # noqa: ARG001
    return h if h.requires_grad else 2 * h


def asking_in_evaluation(net: Any, h: torch.Tensor) -> Any:
    return 2 * h if torch.is_grad_enabled() and not net.training else h


def counting(net: Any, h: torch.Tensor) -> Any:
    if torch.is_grad_enabled():
        net.seen += 1
    return h


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("ask", [asking, looking, asking_in_evaluation, counting])
def test_a_module_that_asks_whether_there_are_gradients_runs_as_it_is(world: World, ask: Forward) -> None:
    @one_at_a_time
    def make() -> nn.Module:
        torch.manual_seed(0)
        parts = {"a": nn.Linear(6, 8), "b": nn.Linear(6, 8), "c": nn.Linear(8, 6), "seen": torch.zeros(())}
        gated = Written(lambda net, x: net.c(ask(net, F.silu(net.a(x)) * net.b(x))), **parts)
        return nn.Sequential(gated, nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()

    def loop(model: Any, local: Callable[..., Any]) -> list[float]:
        numbers = []
        for training, has_gradients in itertools.product((True, False), repeat=2):
            model.train(training)
            with torch.set_grad_enabled(has_gradients):
                numbers.append(float(model(local(x)).detach().sum()))
        model(local(x)).square().mean().backward()
        return [*numbers, float(getattr(model, "module", model)[0].seen)]

    x = torch.rand(6, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = find_blocks(make(), sample=x)
    assert "1.weight" in {name for block in found.blocks for name in block.cuts if name not in ("0.a.weight", "0.b.weight")}
    assert found.reasons["0"].startswith("its forward pass does something else without gradients (torch.no_grad())")
    check_loop(world, make, loop, layouts=lambda size: [simple_layout(list(range(size)))], batch_size=6, sample=x)


@pytest.mark.parametrize(
    ("options", "match"),
    [({"max_norm": 0.5}, "shortens the rows.*max_norm=None"), ({"scale_grad_by_freq": True}, "how often its samples look up")],
)
def test_embeddings_that_count_their_samples_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        find_blocks(nn.Sequential(nn.Embedding(5, 4, **options), nn.Linear(4, 2)))


def test_dropout_draws_for_samples_on_another_axis(world: World) -> None:
    """Also where that axis happens to be as long as this rank's samples are many."""

    x = torch.rand(6, 3, 4, generator=torch.Generator().manual_seed(2))
    torch.manual_seed(0)
    pair = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    model = Written(lambda net, x: net.pair(net.drop(x.transpose(0, 1))).transpose(0, 1), drop=nn.Dropout(0.5), pair=pair)
    torch.manual_seed(1)
    expected = copy.deepcopy(model)(x).detach()
    torch.manual_seed(1)  # the state that tile() takes over

    def body(comm: AbstractCommunicator) -> None:
        tiled = tile(
            model, comm, batch_size=6, sample=x, speeds="equal", layout=simple_layout([0], [1]), reduction="mean", quiet=True
        )
        assert_close({"y": tiled(tiled.local(x)).detach()}, {"y": expected[3 * comm.rank :][:3]}, what="dropout")

    world(body)


def test_layers_that_look_alike_but_compute_other_functions_are_followed_each() -> None:
    class Activated(nn.Module):
        def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
            super().__init__()
            self.up, self.down, self.function = nn.Linear(6, 8), nn.Linear(8, 6), function

        def forward(self, x: torch.Tensor) -> Any:
            up, gate = self.up(x), self.up(2 * x)
            return self.down(self.function(up) * gate)

    model = nn.Sequential(Activated(F.relu), Activated(torch.tanh))
    found = find_blocks(model, sample=torch.randn(4, 6))
    programs = [str(each.training.local.graph.code) for each in found.followed.values()]
    assert ["relu" in program for program in programs] == [True, False]
    assert ["tanh" in program for program in programs] == [False, True]


def sliced(net: Any, x: torch.Tensor) -> torch.Tensor:
    for weight in net.weights[1:]:
        x = torch.tanh(x @ weight)
    return x


def test_a_slice_of_a_list_of_parameters_has_their_gradients(world: World) -> None:
    torch.manual_seed(0)
    network = Written(sliced, weights=nn.ParameterList(torch.rand(6, 6) for _ in range(3))).double()
    x = torch.rand(4, 6, dtype=torch.float64)
    check_once(world, partial(copy.deepcopy, network), x, layouts=lambda _: [simple_layout([0], [1])])


class Normalized(nn.Module):
    """Two convolutions with batch normalization between and after them, and dropout in some."""

    def __init__(self, *, drop: float = 0.0) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 5, 3, bias=False), nn.Conv2d(5, 4, 1, bias=False)
        self.c = nn.Conv2d(4, 2, 1)
        self.norm, self.other = nn.BatchNorm2d(5), nn.BatchNorm2d(4)
        self.drop = nn.Dropout(drop) if drop else nn.Identity()

    def forward(self, x: torch.Tensor) -> Any:
        return self.c(self.other(self.b(torch.tanh(self.drop(self.norm(self.a(x)))))))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("early", [False, True])
def test_batch_normalization_that_is_frozen_in_a_split_module_is_exact(world: World, early: bool) -> None:
    """By eval(), before or after the network is tiled, until step 3; and its weights, all the time."""
    batches = [torch.randn(6, 2, 5, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in range(5)]

    def prepared(model: nn.Module) -> nn.Module:
        norm = model.get_submodule("norm")
        norm.get_parameter("weight").requires_grad_(False)
        with torch.no_grad():
            norm.get_buffer("running_mean").copy_(torch.linspace(-0.3, 0.2, 5))
        norm.train(not early)
        return model

    torch.manual_seed(0)
    network = prepared(Normalized().double())
    assert [block.facts.kind for block in find_blocks(network, sample=batches[0]).blocks] == ["convolution pair"]

    def plans(size: int) -> list[dict[int, Layout]]:
        first, second = simple_layout(list(range(size))), random_layout(size, 1)
        return [{0: first, 2: second, 4: first}]

    check_equal(
        world,
        partial(copy.deepcopy, network),
        [(x,) for x in batches],
        plans=plans,
        change=lambda model, step: model.get_submodule("norm").train(step >= 3),
        options=lambda _: {"sample": batches[0]},
    )


def test_dropout_that_is_frozen_inside_of_a_split_module_is_refused(world: World) -> None:
    torch.manual_seed(0)
    model, x = Normalized(drop=0.5), torch.rand(4, 2, 5, 5)

    def body(comm: AbstractCommunicator) -> None:
        tiled = tile(model, comm, batch_size=4, sample=x, speeds="equal", layout=simple_layout([0, 1]), quiet=True)
        tiled(tiled.local(x))
        tiled.module.get_submodule("drop").eval()
        with pytest.raises(ModelError, match=r"drop of the network .* is in evaluation.* override train"):
            tiled(tiled.local(x))

    world(body)


def test_a_bilinear_layer_may_be_frozen_inside_of_a_split_module(world: World) -> None:
    @one_at_a_time
    def make() -> nn.Module:
        model = build(ODD["biaffine"])
        model.both.requires_grad_(False)
        return cast(nn.Module, model)

    def loop(model: Any, local: Callable[..., Any]) -> None:
        getattr(model, "module", model).get_submodule("both").eval()
        loss_of(model(local(x))).backward()  # type: ignore[no-untyped-call]

    x = drawn(ODD["biaffine"])
    check_loop(world, make, loop, layouts=lambda _: [simple_layout([0, 1])], batch_size=4, sample=x)


def test_the_line_that_keeps_weights_whole_is_named() -> None:
    class Sorting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> Any:
            h = torch.relu(self.a(x)).sort(-1).values
            return self.b(h)

    model = nn.Sequential(Sorting())
    found = find_blocks(model, sample=torch.randn(4, 6))
    assert found.stops["0.a.weight"].endswith("`h = torch.relu(self.a(x)).sort(-1).values`")
    text = describe(model, found, workload=workload_of(model, found, samples=8)).text(width=120)
    assert re.search(r"Linear: 0\.a .*\n +needed whole at test_tiled_odd_networks\.py:\d+ ", text)
