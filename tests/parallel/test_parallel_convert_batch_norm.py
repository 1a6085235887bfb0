"""Networks whose batch normalizations were replaced by those over all ranks."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import tatami
from tatami.comm import AbstractCommunicator
from tatami.comm.threads import single_communicator
from tatami.errors import ModelError
from tatami.parallel import MultiNodeBatchNorm, create_mnbn_model
from tatami.testing.worlds import World


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
    with torch.random.fork_rng():
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
