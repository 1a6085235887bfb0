"""What can not be computed exactly, or can not be, is refused by name before anything is computed."""

import copy
import importlib
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import drawing
from drawing import Written
from tatami.cluster import Cluster
from tatami.comm import AbstractCommunicator, run_threads
from tatami.errors import CommTimeoutError, InputError, ModelError, PlanError
from tatami.train import TiledModel, Trainer, find_blocks, move, tile
from tiled_rig import simple_layout, some_layouts, tiled

pytestmark = pytest.mark.ranks(2)

mlp = partial(drawing.mlp, 4, 8, 2, dtype=torch.float32)


def made(comm: AbstractCommunicator, network: nn.Module | None = None, **options: Any) -> TiledModel:
    return tile(mlp() if network is None else network, comm, **{"batch_size": 8, "speeds": "equal", **options})


SPEEDS = "speeds must be a Cluster, a number > 0 for each rank, 'measure' or 'equal'"


@pytest.mark.parametrize(
    ("speeds", "match"),
    [
        ([1.0], "2 ranks but 1 speeds"),
        ([1.0, 2.0, 3.0], "2 ranks but 3 speeds"),
        (Cluster.from_speeds([1.0]), "2 ranks but 1 speeds"),
        ([1.0, 0.0], f"{SPEEDS}; speeds[1] must be > 0, not 0"),
        ([1.0, -2.0], f"{SPEEDS}; speeds[1] must be > 0, not -2"),
        ([1.0, float("nan")], f"{SPEEDS}; speeds[1] must be a finite number > 0, not nan"),
        (["1", "2"], f"{SPEEDS}; speeds[0] must be a number > 0, not '1'"),
        ([[1.0, 1.0]], f"{SPEEDS}; speeds[0] must be a number > 0, not [1.0, 1.0]"),
        ([1.0, None], f"{SPEEDS}; speeds[1] must be a number > 0, not None"),
        ([], f"{SPEEDS}, not []"),
        (None, f"{SPEEDS}, not None"),
        (2, f"{SPEEDS}, not 2"),
        ({"p0": 1.0, "p1": 1.0}, f"{SPEEDS}, not {{'p0': 1.0, 'p1': 1.0}}"),
        ("fast", f"{SPEEDS}, not 'fast'"),
    ],
)
def test_speeds_that_can_not_be(comm: AbstractCommunicator, speeds: Any, match: str) -> None:
    with pytest.raises(PlanError, match=f"{re.escape(match)}(; give|$)"):
        made(comm, speeds=speeds)


def trainer(comm: AbstractCommunicator, **options: Any) -> Trainer:
    return Trainer(mlp(), comm=comm, **{"optimizer": torch.optim.Adam, "loss": nn.MSELoss(), **options})


def stack(*layers: nn.Module) -> Callable[[Any], object]:
    return lambda comm: made(comm, nn.Sequential(*layers))


def sharing(comm: AbstractCommunicator) -> None:
    shared = nn.Linear(4, 4)
    network = nn.Sequential(shared, nn.Linear(4, 2))
    models = [made(comm, network), made(comm, network)]  # all of it twice: copies
    models.append(made(comm, nn.Sequential(shared, nn.Linear(4, 3))))


INEXACT: list[tuple[Any, ...]] = [
    (r"layer 1 \(SyncBatchNorm\) takes its statistics over the batch", nn.Linear(4, 8), nn.SyncBatchNorm(8), nn.Linear(8, 4)),
    (r"layer 1 \(InstanceNorm1d\) keeps running stat", nn.Linear(4, 8), nn.InstanceNorm1d(8, track_running_stats=True)),
    (r"layer 1 \(AlphaDropout\)", nn.Linear(4, 8), nn.AlphaDropout(), nn.Linear(8, 4)),
    (r"layer 1 \(RReLU\)", nn.Linear(4, 8), nn.RReLU(), nn.Linear(8, 4)),
    (r"layer 3 \(LSTM\) draws random", nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.LSTM(4, 4, 2, dropout=0.5)),
    (r"layer 0 \(Embedding\) has sparse", nn.Embedding(4, 4, sparse=True), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)),
]
REFUSED: dict[str, tuple[type[Exception], str, Callable[[Any], object]]] = {
    "planner": (PlanError, "no planner 'best'.*srpm", lambda comm: made(comm, planner="best")),
    "reduction": (InputError, "reduction must be 'mean' or 'sum'.*'none'", lambda comm: made(comm, reduction="none")),
    "dropout": (
        ModelError,
        r"calls dropout \(node dropout\)",
        lambda comm: made(
            comm, Written(lambda net, x: net.down(F.dropout(net.up(x), 0.5)), up=nn.Linear(4, 8), down=nn.Linear(8, 4))
        ),
    ),
    "order": (InputError, r"not \w+Communicator and Sequential", lambda comm: tile(comm, mlp(), batch_size=8)),  # type: ignore[arg-type]
    "no ranks": (InputError, "not Sequential and NoneType", lambda _: tile(mlp(), None, batch_size=8)),  # type: ignore[arg-type]
    "function": (
        InputError,
        r"not a function that returns int and \w+",
        lambda comm: tile(lambda: 3, comm, batch_size=8),  # type: ignore[arg-type,return-value]
    ),
    "tiled": (InputError, "this model is tiled already", lambda comm: made(comm, made(comm, quiet=True), quiet=True)),
    "a shared layer": (InputError, r"2 parameters of this network \(0\.weight, .* of another one that is tiled", sharing),
    "class of a loss": (
        InputError,
        r"the loss is the class MSELoss; give one of it: MSELoss\(\)",
        lambda comm: trainer(comm, loss=nn.MSELoss),
    ),
    "name of an optimizer": (
        InputError,
        "optimizer must be one of torch's, .* not 'adam'",
        lambda comm: trainer(comm, optimizer="adam").fit((torch.ones(8, 4), torch.ones(8, 2)), batch_size=8, epochs=1),
    ),
    **{f"layer {index}": (ModelError, match, stack(*layers)) for index, (match, *layers) in enumerate(INEXACT)},
}
DISAGREEING: dict[str, tuple[type[Exception], str, Callable[[Any], object]]] = {
    "batch size": (
        PlanError,
        "rank 0 has batch_size 8, rank 1 has batch_size 9",
        lambda comm: made(comm, batch_size=8 + comm.rank),
    ),
    "speeds": (
        PlanError,
        "rank 0 has speeds .*, rank 1 has speeds .*; all ranks must have the same",
        lambda comm: made(comm, speeds=[1.0] * (comm.size - 1) + [2.0 + comm.rank]),
    ),
    "network": (
        InputError,
        r"tatami.tile: rank 0 has 0.weight \(8, 4\) float32, rank 1 has 0.weight \(9, 4\) float32",
        lambda comm: made(comm, drawing.mlp(4, 8 + comm.rank, 2, dtype=torch.float32)),
    ),
}


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_exact_or_cannot_be_is_refused_by_name(comm: AbstractCommunicator, what: str) -> None:
    error, match, call = REFUSED[what]
    with pytest.raises(error, match=match):
        call(comm)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("what", DISAGREEING)
def test_ranks_that_disagree(comm: AbstractCommunicator, what: str) -> None:
    error, match, call = DISAGREEING[what]
    with pytest.raises(error, match=match):
        call(comm)


@pytest.mark.ranks(3)
def test_more_ranks_than_units_have_replicas_of_their_own(comm: AbstractCommunicator) -> None:
    narrow, x = drawing.mlp(4, 2, 2, dtype=torch.float32), torch.arange(36.0).view(9, 4) / 36
    model = tile(narrow, comm, batch_size=9, speeds="equal", reduction="mean", quiet=True)
    model(model.local(x)).square().mean().backward()
    wanted = torch.autograd.grad(narrow(x).square().mean(), list(narrow.parameters()))
    assert model.tile is not None
    if len(model.tiling.replicas[model.tile.replica]) == 1:
        for got, want in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(got.grad, want)
    assert len(model.tiling.tiles) == 3


def test_ranks_wait_longer_for_each_other_while_a_network_is_set_up_and_not_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("tatami.model.tile"), "SETUP_TIMEOUT_S", 0.5)
    has_given_up = threading.Event()

    def body(comm: AbstractCommunicator) -> None:
        if comm.rank == 1:  # still at work
            assert has_given_up.wait(timeout=60)
            return
        with pytest.raises(CommTimeoutError, match=r"rank 0 has set up the network and waited .* timed out after 0\.[5-9]"):
            tile(mlp(), comm, batch_size=8, speeds="equal")
        assert comm.timeout_s == 0.05
        has_given_up.set()

    run_threads(body, size=2, timeout_s=0.05)


@pytest.mark.ranks(2, 3)
def test_a_retiling_that_ranks_see_differently(comm: AbstractCommunicator) -> None:
    model = laid(comm)
    ranks = list(range(comm.size))
    with pytest.raises(PlanError, match=r"a re-tiling: rank 0 has layout .*, rank 1 has layout"):
        move(model, simple_layout(ranks if comm.rank == 0 else ranks[::-1]), optimizer=None)


def noisy(net: Any, x: torch.Tensor) -> Any:
    """Draws what torch.fx takes for a constant."""
    return net.down(torch.relu(net.up(x))) + torch.randn(4)


def quiet_forward(net: Any, x: torch.Tensor) -> Any:
    """Calls what could draw, and does not."""
    x = net.drop(net.lstm(x[:, None])[0])
    return F.dropout(F.scaled_dot_product_attention(x, x, x), 0.5, training=False)[:, 0]


def test_noise_that_was_not_seen_is_refused_in_the_first_pass(comm: AbstractCommunicator) -> None:
    line = r"draws random numbers at test_tiled_refused.py:\d+ `return .* torch.randn\(4\)` \(aten.randn.default\)"
    model = tile(Written(noisy, up=nn.Linear(4, 8), down=nn.Linear(8, 4)), comm, batch_size=8, speeds="equal", reduction="mean")
    with pytest.raises(ModelError, match=line):
        model(model.local(torch.ones(8, 4)))
    model = tile(
        Written(quiet_forward, lstm=nn.LSTM(4, 4, 2, batch_first=True), drop=nn.Dropout(0.5)),
        comm,
        batch_size=8,
        speeds="equal",
        reduction="mean",
    )
    assert model(model.local(torch.ones(8, 4))).shape == (4, 4)


def compiled_in_place(network: nn.Module) -> nn.Module:
    network.compile()
    return network


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "match"),
    [
        (torch.jit.script, r"the network was made by torch.jit"),
        (torch.compile, r"the network was made by torch.compile"),
        (compiled_in_place, r"the network was made by torch.compile"),
        (lambda net: nn.Sequential(cast(nn.Module, torch.compile(net))), r"layer 0 was made by torch.compile"),
    ],
)
def test_networks_that_were_compiled(make: Callable[[nn.Module], Any], match: str) -> None:
    for sample in (None, torch.ones(2, 4)):
        with pytest.raises(ModelError, match=rf"{match}, and cannot be .* Give the network that it was made of"):
            find_blocks(make(mlp()), sample=sample)


@pytest.mark.parametrize("sample", [torch.ones(4, 5), (torch.ones(4, 4), torch.ones(4)), torch.ones(4, 4, dtype=torch.int64)])
def test_a_sample_that_the_network_does_not_take(sample: Any) -> None:
    with pytest.raises(ModelError, match=r"Sequential does not run on the sample batch \((float32|int64) \(4, .* targets"):
        find_blocks(mlp(), sample=sample)


@pytest.mark.threads_only
@pytest.mark.ranks(2)
def test_what_is_given_in_place_of_a_layout_a_batch_or_a_tile(comm: AbstractCommunicator) -> None:
    model = laid(comm)
    with pytest.raises(PlanError, match=r"takes a tatami.tiling.Layout, .* not \[0.5, 0.5\]"):
        move(model, [0.5, 0.5], optimizer=None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"a list of 8 tuples, which seem to be samples.*default_collate"):
        model.local([(torch.ones(4), torch.tensor(1)) for _ in range(8)])
    with pytest.raises(ModelError, match=r"these are whole weights, .*load_whole_state_dict\(model, weights\)"):
        model.load_state_dict(mlp().state_dict())
    with pytest.raises(ModelError, match=r"these are whole weights, .*without 'module\.'"):
        model.load_state_dict({f"module.{name}": value for name, value in mlp().state_dict().items()})
    if model.module.get_submodule("0").weight.shape != mlp()[0].weight.shape:
        with pytest.raises(ModelError, match=r"0\.weight is \(\d+, \d+\), and \(\d+, \d+\) here\): .*load_whole_state_dict"):
            model.module.load_state_dict(mlp().state_dict())
    model.load_state_dict(model.state_dict())


FIRST_PASS = """
import sys, torch, tatami
from tatami.comm.threads import run_threads

def body(comm):
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    model = tatami.tile(net, comm, batch_size=8, speeds="equal", reduction="mean", quiet=True)
    model(model.local(torch.ones(8, 4))).mean().backward()

run_threads(body, size=2)
print("torch._dynamo" in sys.modules)
"""


def test_the_first_pass_does_not_import_the_compiler() -> None:
    """40 MiB of every rank."""
    done = subprocess.run([sys.executable, "-c", FIRST_PASS], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["False"]


def test_packages_are_found_without_their_own_import() -> None:
    code = "import tatami; print(tatami.train.register.__name__, hasattr(tatami, 'tild'), hasattr(tatami, '_lazy'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["register", "False", "False"]


def laid(comm: AbstractCommunicator) -> TiledModel:
    return tiled(mlp(), comm, layout=some_layouts(comm.size)[1], batch_size=8)


@pytest.mark.ranks(2, 3)
def test_forward_with_other_samples_than_those_of_this_rank(comm: AbstractCommunicator) -> None:
    model = laid(comm)
    with pytest.raises(InputError, match=f"rank {comm.rank} does not know its samples"):
        model(torch.rand(4, 4))
    mine = model.local(torch.rand(8, 4))
    with pytest.raises(InputError, match=rf"the input has 8 samples, but {len(mine)} of the 8 samples"):
        model(torch.rand(8, 4))
    with pytest.raises(InputError, match=r"the input has 8 samples.* trainer\.evaluate\(\.\.\.\), or .* model\.whole\(\)"):
        model(input=torch.rand(8, 4))
    with pytest.raises(InputError, match=r"same number of samples, not \[3, 4\]"):
        model.local(torch.rand(3, 4), torch.rand(4, 2))
    move(model, simple_layout(list(range(comm.size))), optimizer=None)
    with pytest.raises(InputError, match="again after a re-tiling"):
        model(mine)


def test_a_rank_without_units_can_not_evaluate_alone(comm: AbstractCommunicator) -> None:
    model = tiled(mlp(), comm, layout=simple_layout([1]), batch_size=8)
    with torch.no_grad():
        if comm.rank == 0:
            with pytest.raises(InputError, match="rank 0 was left out of the tiling"):
                model(torch.rand(3, 4))
            assert model(model.local(torch.rand(3, 4))).shape == (0, 2)
        else:
            assert model(torch.rand(3, 4)).shape == (3, 2)


def test_gradients_before_any_forward_pass(comm: AbstractCommunicator) -> None:
    """They come from a layer that is called by itself, and from a penalty on a weight."""
    model = laid(comm)
    for term in (model.module(model.local(torch.rand(8, 4))).mean(), next(model.parameters()).square().sum()):
        with pytest.raises(ModelError, match=r"to a weight before the first forward pass .* a penalty .*Call the model first"):
            term.backward()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps])
def test_copies_and_pickles(comm: AbstractCommunicator, duplicate: Callable[[object], object]) -> None:
    model = tiled(mlp(), comm, layout=simple_layout(list(range(comm.size))), batch_size=8)
    with pytest.raises(ModelError, match=r"cannot be copied or pickled.*save_model"):
        duplicate(model)


def test_retiling_between_forward_and_backward(comm: AbstractCommunicator) -> None:
    model = laid(comm)
    loss = model(model.local(torch.linspace(0, 1, 32).view(8, 4))).mean()
    move(model, simple_layout([0, 1]), optimizer=None)
    with pytest.raises(ModelError, match="re-tiled between this forward pass and its backward pass"):
        loss.backward()


def test_a_layout_of_strangers_changes_nothing(comm: AbstractCommunicator) -> None:
    model = laid(comm)
    before = model.layout, model.tilings
    with pytest.raises(PlanError, match=r"no rank runs on: \['p2'\]"):
        move(model, simple_layout([0, 1, 2]), optimizer=None)
    assert (model.layout, model.tilings) == before


def test_dropout_off_the_sample_axis(comm: AbstractCommunicator) -> None:
    turned = Written(lambda net, x: net.drop(net.pair(x).flatten(0, 1)), pair=mlp(), drop=nn.Dropout(0.5))
    model = tiled(turned, comm, layout=some_layouts(2)[1], batch_size=6)
    with pytest.raises(InputError, match=r"dropout got \d+ rows where"):
        model(model.local(torch.linspace(0, 1, 72).view(6, 3, 4)))


@pytest.mark.ranks(1, 2)
def test_an_optimizer_of_the_plain_network_is_refused_in_its_first_step(comm: AbstractCommunicator) -> None:
    """As is usual with DistributedDataParallel, whose parameters are the network's: here nothing would be trained."""
    network = mlp()
    model = tile(network, comm, batch_size=8, speeds="equal", reduction="mean", quiet=True)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    model(model.local(torch.ones(8, 4))).mean().backward()
    with pytest.raises(InputError, match=r"step changes nothing: .* make the optimizer from model.parameters\(\)"):
        optimizer.step()
    network(torch.ones(8, 4)).mean().backward()
    optimizer.step()  # the plain network may be trained beside it
