"""Batch normalization over ranks, against torch's over the whole batch; and networks that are converted to it."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import tatami
from tatami import batch_statistics, functions
from tatami.comm import AbstractCommunicator
from tatami.comm.threads import single_communicator
from tatami.errors import CommError, InputError, ModelError
from tatami.parallel import MultiNodeBatchNorm, create_mnbn_model
from tatami.random_state import kept_torch_state
from tatami.testing.worlds import World

CHANNELS = 3
SPACES: dict[str, tuple[tuple[int, ...], type[nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d]]] = {
    "plain": ((), nn.BatchNorm1d),
    "1d": ((4,), nn.BatchNorm1d),
    "2d": ((2, 3), nn.BatchNorm2d),
    "3d": ((2, 1, 3), nn.BatchNorm3d),
}
SAMPLES = {"equal": (4, 4, 4, 4), "uneven": (4, 12, 1, 7), "some empty": (3, 0, 5, 0)}
SETTINGS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "no affine": {"affine": False},
    "no running statistics": {"track_running_stats": False},
    "mean of all batches": {"momentum": None},
    "neither": {"affine": False, "track_running_stats": False, "eps": 0.1},
}
STEPS = 3


def draw(shape: tuple[int, ...], *, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def part(counts: tuple[int, ...], rank: int) -> slice:
    return slice(sum(counts[:rank]), sum(counts[: rank + 1]))


def check_against_whole_batch(
    world: World, *, space: str, counts: tuple[int, ...], settings: dict[str, Any], dtype: torch.dtype, atol: float
) -> None:
    """Training steps, whose losses are each rank's part of one sum, then an evaluation."""
    counts = counts[: world.size]
    dims, kind = SPACES[space]
    whole = kind(CHANNELS, **settings, dtype=dtype)
    if whole.affine:
        whole.weight.data = draw((CHANNELS,), seed=1, dtype=dtype)
        whole.bias.data = draw((CHANNELS,), seed=2, dtype=dtype)
    start = deepcopy(whole.state_dict())
    batches = [1 + 3 * draw((sum(counts), CHANNELS, *dims), seed=10 + i, dtype=dtype) for i in range(STEPS + 1)]
    weights = draw(tuple(batches[0].shape), seed=3, dtype=dtype)
    xs = [batch.clone().requires_grad_() for batch in batches]
    outputs = [whole(x) for x in xs[:STEPS]]
    torch.stack([(output**2 * weights).sum() for output in outputs]).sum().backward()  # type: ignore[no-untyped-call]
    whole.eval()
    evaluated = whole(batches[STEPS]).detach()

    def body(comm: AbstractCommunicator) -> dict[str, Any]:
        mine = part(counts, comm.rank)
        norm = MultiNodeBatchNorm(CHANNELS, comm, **settings, dtype=dtype)
        norm.load_state_dict(start)
        local = [batch[mine].clone().requires_grad_() for batch in batches]
        got = []
        for x in local[:STEPS]:
            output = norm(x)
            (output**2 * weights[mine]).sum().backward()
            got.append(output.detach())
        norm.eval()
        with torch.no_grad():
            got.append(norm(local[STEPS]))
        return {
            "outputs": got,
            "x": [x.grad for x in local[:STEPS]],
            "parameters": {name: each.grad for name, each in norm.named_parameters()},
            "buffers": dict(norm.named_buffers()),
        }

    ran = world(body)
    close: dict[str, Any] = {"rtol": atol, "atol": atol}
    for i, expected in enumerate([*[output.detach() for output in outputs], evaluated]):
        torch.testing.assert_close(torch.cat([each["outputs"][i] for each in ran]), expected, **close)
    for i in range(STEPS):
        torch.testing.assert_close(torch.cat([each["x"][i] for each in ran]), xs[i].grad, **close)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(torch.stack([each["parameters"][name] for each in ran]).sum(0), parameter.grad, **close)
    for each in ran:
        torch.testing.assert_close(each["buffers"], dict(whole.named_buffers()), **close)
        assert all(torch.equal(each["buffers"][name], ran[0]["buffers"][name]) for name in each["buffers"])


@pytest.mark.parametrize("samples", sorted(SAMPLES))
@pytest.mark.parametrize("space", sorted(SPACES))
def test_it_is_that_of_the_whole_batch(world: World, space: str, samples: str) -> None:
    check_against_whole_batch(world, space=space, counts=SAMPLES[samples], settings={}, dtype=torch.float64, atol=1e-10)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("settings", sorted(SETTINGS))
def test_all_settings(world: World, settings: str) -> None:
    check_against_whole_batch(world, space="2d", counts=(0, 4, 3), settings=SETTINGS[settings], dtype=torch.float64, atol=1e-10)


@pytest.mark.ranks(1, 3)
@pytest.mark.threads_only
@pytest.mark.parametrize("elements", [1, 25])
def test_a_large_batch_is_gone_through_in_parts(world: World, monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    """Of one sample and of two, the last of which may be of one."""
    monkeypatch.setattr(batch_statistics, "_PART_ELEMENTS", elements)
    monkeypatch.setattr(batch_statistics, "_FEW_ELEMENTS", 0)
    check_against_whole_batch(world, space="1d", counts=SAMPLES["uneven"], settings={}, dtype=torch.float64, atol=1e-9)


def test_batches_small_and_large_before_one_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own layer takes the small ones, and its backward pass refuses running statistics that have changed."""
    monkeypatch.setattr(batch_statistics, "_FEW_ELEMENTS", 100)
    batches = [draw((samples, CHANNELS, 3), seed=samples, dtype=torch.float64) for samples in (4, 40, 5, 50)]
    alone = batch_statistics.SharedBatch(sums=None, name="layer", channels=CHANNELS)
    found = []
    for is_plain in (True, False):
        layer = nn.BatchNorm1d(CHANNELS, dtype=torch.float64)
        outputs = [layer(x) if is_plain else batch_statistics.run_layer(layer, x, batch=lambda: alone) for x in batches]
        torch.autograd.backward([each.pow(3).mean() for each in outputs])
        found.append([*(parameter.grad for parameter in layer.parameters()), *layer.buffers()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(2, 4)
def test_single_precision(world: World) -> None:
    check_against_whole_batch(world, space="2d", counts=SAMPLES["uneven"], settings={}, dtype=torch.float32, atol=1e-5)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-3), (torch.float64, 1e-12)])
def test_a_mean_far_from_zero_keeps_its_variance(comm: AbstractCommunicator, dtype: torch.dtype, rtol: float) -> None:
    """The mean of squares minus the square of the mean would leave nothing of it in the precision of the values."""
    x = 4096 + draw((12, CHANNELS), seed=6, dtype=torch.float64)
    expected = x.var(0)
    norm = MultiNodeBatchNorm(CHANNELS, comm, momentum=1.0, dtype=dtype)
    norm(x.to(dtype)[part((3, 7, 2), comm.rank)])
    assert norm.running_var is not None
    variance = norm.running_var.double()
    torch.testing.assert_close(variance, expected, rtol=rtol, atol=0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parameters", [torch.float32, None])
def test_half_precision_normalizes_in_single(world: World, dtype: torch.dtype, parameters: torch.dtype | None) -> None:
    x = draw((10, CHANNELS, 4), seed=7, dtype=dtype)
    expected = nn.BatchNorm1d(CHANNELS)(x.float())

    def body(comm: AbstractCommunicator) -> torch.Tensor:
        norm = MultiNodeBatchNorm(CHANNELS, comm).to(parameters or dtype)
        output: torch.Tensor = norm(x[part((3, 7), comm.rank)])
        output.sum().backward()  # type: ignore[no-untyped-call]
        assert output.dtype == dtype
        assert norm.weight.grad is not None
        assert norm.weight.grad.dtype == norm.weight.dtype
        return output.detach()

    torch.testing.assert_close(torch.cat(world(body)), expected.to(dtype), rtol=1e-2, atol=1e-2)


@pytest.mark.ranks(2, 3)
def test_a_gradient_penalty_through_it(world: World) -> None:
    counts = (4, 1, 3)[: world.size]
    x = draw((sum(counts), CHANNELS), seed=8, dtype=torch.float64)
    weights = draw(tuple(x.shape), seed=9, dtype=torch.float64)
    whole = nn.BatchNorm1d(CHANNELS, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad((whole(leaf) ** 3 * weights).sum(), leaf, create_graph=True)
    (slope**2).sum().backward()  # type: ignore[no-untyped-call]

    def body(comm: AbstractCommunicator) -> tuple[torch.Tensor, torch.Tensor | None]:
        mine = part(counts, comm.rank)
        norm = MultiNodeBatchNorm(CHANNELS, comm, dtype=torch.float64)
        local = x[mine].clone().requires_grad_()
        (slope,) = functions.grad((norm(local) ** 3 * weights[mine]).sum(), local, create_graph=True)
        functions.backward((slope**2).sum())
        assert local.grad is not None
        return local.grad, norm.weight.grad

    ran = world(body)
    torch.testing.assert_close(torch.cat([grad for grad, _ in ran]), leaf.grad, rtol=1e-10, atol=1e-10)
    share = torch.stack([grad for _, grad in ran if grad is not None]).sum(0)
    torch.testing.assert_close(share, whole.weight.grad, rtol=1e-10, atol=1e-10)


def test_no_samples_at_all_change_nothing(comm: AbstractCommunicator) -> None:
    norm = MultiNodeBatchNorm(CHANNELS, comm)
    x = torch.zeros(0, CHANNELS, 2, requires_grad=True)
    output = norm(x)
    output.sum().backward()
    assert output.shape == (0, CHANNELS, 2)
    assert [each.tolist() for each in norm.buffers()] == [[0] * CHANNELS, [1] * CHANNELS, 1]
    assert x.grad is not None
    assert norm.weight.grad is not None
    assert not norm.weight.grad.any()


def test_bad_input(comm: AbstractCommunicator) -> None:
    norm = MultiNodeBatchNorm(CHANNELS, comm)
    with pytest.raises(InputError, match=rf"on rank {comm.rank}: input has the shape \(4, 2\); give \(samples, 3, \.\.\.\)"):
        norm(torch.zeros(4, 2))
    with pytest.raises(InputError, match=r"input has the shape \(3,\)"):
        norm(torch.zeros(3))
    with pytest.raises(InputError, match="all ranks together have one value for each channel, which has no variance"):
        norm(torch.zeros(int(comm.rank == 0), CHANNELS))
    with pytest.raises(InputError, match="num_features must be at least 1, not 0"):
        MultiNodeBatchNorm(0, comm)


@pytest.mark.ranks(2)
def test_other_channels_on_another_rank(comm: AbstractCommunicator) -> None:
    norm = MultiNodeBatchNorm(2 + comm.rank, comm)
    with pytest.raises(CommError, match=f"rank {1 - comm.rank} has {3 - comm.rank} channels and rank {comm.rank} has"):
        norm(torch.zeros(4, 2 + comm.rank))


def test_its_state_and_its_copies(comm: AbstractCommunicator) -> None:
    norm = MultiNodeBatchNorm(CHANNELS, comm)
    assert list(norm.state_dict()) == list(nn.BatchNorm2d(CHANNELS).state_dict())
    twin = deepcopy(norm)
    assert twin.comm is comm
    assert twin.weight is not norm.weight


class Nested(nn.Module):
    """Normalizations in an attribute, in a list, in a dict, in a block of a block, and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.BatchNorm2d(4)
        self.first = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), shared, nn.ReLU())
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, affine=False))) for _ in range(2)
        )
        self.again = shared
        self.lines = nn.BatchNorm1d(4, momentum=None, eps=1e-3)
        self.space = nn.BatchNorm3d(4, track_running_stats=False)
        self.heads = nn.ModuleDict({"norm": nn.BatchNorm1d(4), "out": nn.Linear(4, 2)})

    def forward(self, x: torch.Tensor) -> Any:
        h = self.first(x)
        for block in self.blocks:
            h = self.again(torch.tanh(block(h)))
        h = self.space(h.unsqueeze(-1)).squeeze(-1)
        h = self.heads["norm"](self.lines(h.flatten(2)).mean(2))
        return self.heads["out"](h)


def build() -> Nested:
    with kept_torch_state():
        torch.manual_seed(4)
        return Nested().double()


@pytest.mark.ranks(1, 3)
def test_a_nested_network_is_that_of_the_whole_batch(world: World) -> None:
    """Forward, backward, buffers and evaluation, over two steps; one rank has no samples."""
    network = build()
    counts = (3, 0, 5) if world.size == 3 else (8,)
    x = torch.randn((8, 2, 3, 3), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plain = deepcopy(network)
    for _ in range(2):
        (plain(x) ** 2).sum().backward()
    evaluated = plain.eval()(x).detach()

    def body(comm: AbstractCommunicator) -> dict[str, Any]:
        model = create_mnbn_model(network, comm)
        mine = x[sum(counts[: comm.rank]) : sum(counts[: comm.rank + 1])]
        for _ in range(2):
            (model(mine) ** 2).sum().backward()
        buffers = {name: each.clone() for name, each in model.named_buffers()}
        with torch.no_grad():
            output = model.eval()(mine)
        return {"grads": {name: each.grad for name, each in model.named_parameters()}, "buffers": buffers, "output": output}

    ran = world(body)
    torch.testing.assert_close(torch.cat([each["output"] for each in ran]), evaluated, rtol=0, atol=1e-10)
    for name, parameter in plain.named_parameters():
        total = torch.stack([each["grads"][name] for each in ran]).sum(0)
        torch.testing.assert_close(total, parameter.grad, rtol=0, atol=1e-10)
    for each in ran:
        torch.testing.assert_close(each["buffers"], dict(plain.named_buffers()), rtol=0, atol=1e-10)


@pytest.mark.ranks(2)
def test_under_data_parallelism_gradients_are_those_of_one_process(world: World) -> None:
    """With uneven local batches and a mean loss: no weighting by hand."""
    network = build()
    x = torch.randn((8, 2, 3, 3), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    plain = deepcopy(network)
    for _ in range(2):
        (plain(x) ** 2).mean().backward()

    def body(comm: AbstractCommunicator) -> dict[str, torch.Tensor | None]:
        model = tatami.DataParallel(create_mnbn_model(network, comm), comm)
        for _ in range(2):
            (model(x[:3] if comm.rank == 0 else x[3:]) ** 2).mean().backward()
        return {name: each.grad for name, each in model.module.named_parameters()}

    for grads in world(body):
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, rtol=0, atol=1e-10)


def test_everything_else_is_copied_and_stays_shared() -> None:
    comm = single_communicator()
    network = build()
    network.heads["out"].weight.requires_grad_(False)
    network.lines.eval()
    calls: list[nn.Module] = []
    network.again.register_forward_hook(lambda module, _, __: calls.append(module))
    model = create_mnbn_model(network, comm)
    kinds = [type(each) for each in network.modules()]
    assert [type(each) for each in model.modules()] == [
        MultiNodeBatchNorm if issubclass(kind, nn.modules.batchnorm._BatchNorm) else kind for kind in kinds
    ]
    assert model.first[1] is model.again
    assert isinstance(model.again, MultiNodeBatchNorm)
    assert model.again.comm is comm
    assert list(model.state_dict()) == list(network.state_dict())
    for (name, mine), (_, theirs) in zip(model.state_dict().items(), network.state_dict().items(), strict=True):
        assert torch.equal(mine, theirs), name
        assert mine.data_ptr() != theirs.data_ptr(), name
    assert (model.lines.eps, model.lines.momentum, model.lines.training) == (1e-3, None, False)
    assert not model.heads["out"].weight.requires_grad
    model(torch.ones(2, 2, 3, 3, dtype=torch.float64))
    assert calls == [model.again] * 3
    network.load_state_dict(model.state_dict())


def test_a_network_that_is_a_normalization_and_what_is_none() -> None:
    comm = single_communicator()
    norm: nn.Module = nn.BatchNorm2d(3)
    for _ in range(2):
        norm = create_mnbn_model(norm, comm)
        assert isinstance(norm, MultiNodeBatchNorm)
    synced = create_mnbn_model(nn.Sequential(nn.SyncBatchNorm(3)), comm)
    assert type(synced[0]) is MultiNodeBatchNorm
    others = create_mnbn_model(nn.Sequential(nn.InstanceNorm2d(3), nn.LayerNorm(3), nn.GroupNorm(1, 3)), comm)
    assert [type(each) for each in others] == [nn.InstanceNorm2d, nn.LayerNorm, nn.GroupNorm]


def test_tied_weights_stay_tied() -> None:
    network = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    network[1].weight = network[0].weight
    model = create_mnbn_model(network, single_communicator())
    assert model[0].weight is model[1].weight
    assert model[0].weight is not network[0].weight


def test_what_can_not_be_replaced_is_refused_by_name() -> None:
    comm = single_communicator()

    class Own(nn.BatchNorm2d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    with pytest.raises(ModelError, match=r"^1\.0 is a Own with a forward of its own, which the copy would lose"):
        create_mnbn_model(nn.Sequential(nn.ReLU(), nn.Sequential(Own(3))), comm)
    with pytest.raises(
        ModelError, match=r"^the model is a LazyBatchNorm1d that does not know its channels yet; run the model once"
    ):
        create_mnbn_model(nn.LazyBatchNorm1d(), comm)
    lazy = nn.Sequential(nn.LazyBatchNorm1d())
    lazy(torch.randn(4, 3))
    assert isinstance(create_mnbn_model(lazy, comm)[0], MultiNodeBatchNorm)
