"""Convolutions divided among ranks: the dense form is the convolution itself, the grouped form ChainerMN's."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from tatami import functions
from tatami.comm import AbstractCommunicator
from tatami.comm.threads import single_communicator
from tatami.errors import InputError, ModelError
from tatami.parallel import ParallelConv
from tatami.testing.worlds import World

F64 = torch.float64
Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def filled(conv: Conv) -> Conv:
    for seed, parameter in enumerate(conv.parameters()):
        parameter.data = draw(*parameter.shape, seed=seed)
    return conv


DENSE: dict[str, tuple[Conv, tuple[int, ...]]] = {
    "1d": (nn.Conv1d(4, 6, 3, dtype=F64), (2, 4, 7)),
    "2d": (nn.Conv2d(3, 7, (3, 2), stride=2, padding=1, bias=False, dtype=F64), (2, 3, 5, 6)),
    "3d": (nn.Conv3d(2, 5, 2, dilation=2, dtype=F64), (2, 2, 4, 3, 3)),
    "unbatched": (nn.Conv2d(3, 4, 3, dtype=F64), (3, 5, 5)),
    "padded around": (nn.Conv2d(3, 4, 3, padding="same", padding_mode="circular", dtype=F64), (1, 3, 4, 4)),
    "groups": (nn.Conv2d(8, 16, 3, groups=4, dtype=F64), (2, 8, 4, 4)),
    "each channel by itself": (nn.Conv1d(6, 12, 2, groups=6, dtype=F64), (2, 6, 5)),
    "fewer channels than ranks": (nn.Conv1d(3, 2, 2, dtype=F64), (2, 3, 5)),
}


def masked(conv: Conv, *, size: int) -> Conv:
    """`conv` without the weights that ChainerMN's form does not have, as its own index arithmetic names them."""
    dense = deepcopy(conv)
    keep = torch.zeros_like(dense.weight)
    start = 0
    for rank in range(size):
        num_rows = conv.out_channels // size + (1 if rank < conv.out_channels % size else 0)
        for column in range(conv.in_channels):
            if column % size == rank:
                keep[start : start + num_rows, column] = 1
        start += num_rows
    dense.weight.data *= keep
    return dense


def check_against(world: World, dense: Conv, parallel: Any, *, shape: tuple[int, ...]) -> None:
    """Output and gradients of a layer between two that all ranks hold alike, with a loss that all compute alike."""
    x = draw(*shape, seed=20)
    before = torch.tensor([0.5], dtype=F64)
    scale = before.clone().requires_grad_()
    leaf = x.clone().requires_grad_()
    dense.zero_grad()
    expected = dense(leaf * scale)
    weights = draw(*expected.shape, seed=21)
    (expected.sin() * weights).sum().backward()

    def body(comm: AbstractCommunicator) -> dict[str, Any]:
        conv = parallel(comm)
        mine, factor = x.clone().requires_grad_(), before.clone().requires_grad_()
        output = conv(mine * factor)
        functions.share((output.sin() * weights).sum(), comm).backward()  # type: ignore[no-untyped-call]
        return {
            "output": output.detach(),
            "x": mine.grad,
            "factor": factor.grad,
            "channels": conv.channels,
            "own": {name: each.grad for name, each in conv.named_parameters()},
            "inputs": None if conv.conv is None else conv.conv.weight.shape[1],
        }

    ran = world(body)
    close: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}
    for each in ran:
        torch.testing.assert_close(each["output"], expected.detach(), **close)
        assert sum(each["channels"]) == dense.out_channels
    # What all ranks hold alike has each rank's share of the gradient.
    torch.testing.assert_close(torch.stack([each["x"] for each in ran]).sum(0), leaf.grad, **close)
    torch.testing.assert_close(torch.stack([each["factor"] for each in ran]).sum(0), scale.grad, **close)
    start = 0
    for rank, each in enumerate(ran):
        rows = slice(start, start + each["channels"][rank])
        start = rows.stop
        if rows.start == rows.stop:
            assert each["own"] == {}
            continue
        assert dense.weight.grad is not None
        columns = slice(None)
        if each["inputs"] < dense.weight.shape[1]:
            columns = slice(rank, None, world.size)
        torch.testing.assert_close(each["own"]["conv.weight"], dense.weight.grad[rows, columns], **close)
        if dense.bias is not None and dense.bias.grad is not None:
            torch.testing.assert_close(each["own"]["conv.bias"], dense.bias.grad[rows], **close)


@pytest.mark.parametrize("kind", sorted(DENSE))
def test_the_dense_form_is_the_convolution(world: World, kind: str) -> None:
    conv, shape = DENSE[kind]
    filled(conv)
    check_against(world, deepcopy(conv), lambda comm: ParallelConv(conv, comm), shape=shape)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("kind", "channels"), [("2d", (1, 4, 2)), ("2d", (0, 7, 0)), ("groups", (12, 0, 4))])
def test_ranks_may_have_unequal_shares(world: World, kind: str, channels: tuple[int, ...]) -> None:
    conv, shape = DENSE[kind]
    filled(conv)
    check_against(world, deepcopy(conv), lambda comm: ParallelConv(conv, comm, channels=channels), shape=shape)


@pytest.mark.parametrize(("inputs", "outputs"), [(8, 12), (5, 7)])
def test_the_grouped_form_is_chainermns(world: World, inputs: int, outputs: int) -> None:
    """The convolution with the weights between the groups zero: each output sees one in `size` of the inputs."""
    conv = filled(nn.Conv2d(inputs, outputs, 3, padding=1, dtype=F64))
    dense = masked(conv, size=world.size)
    check_against(world, dense, lambda comm: ParallelConv(conv, comm, grouped=True), shape=(2, inputs, 4, 4))


@pytest.mark.ranks(2)
def test_the_forms_differ(comm: AbstractCommunicator) -> None:
    conv = filled(nn.Conv1d(4, 4, 1, dtype=F64))
    x = draw(1, 4, 3, seed=1)
    dense, grouped = ParallelConv(conv, comm), ParallelConv(conv, comm, grouped=True)
    assert dense.conv is not None
    assert grouped.conv is not None
    assert dense.conv.weight.numel() == 2 * grouped.conv.weight.numel()
    with torch.no_grad():
        assert float((dense(x) - grouped(x)).abs().max()) > 0.1


@pytest.mark.ranks(2)
def test_copies_and_settings(comm: AbstractCommunicator) -> None:
    whole = nn.Conv2d(2, 3, 3)
    assert whole.bias is not None
    whole.bias.requires_grad_(False)
    conv = ParallelConv(whole, comm)
    twin = deepcopy(conv)
    assert twin.comm is comm
    assert conv.conv is not None
    assert twin.conv is not conv.conv
    assert conv.conv.bias is not None
    assert not conv.conv.bias.requires_grad
    assert whole.out_channels == 3
    assert repr(conv).splitlines()[1].strip() == f"dense, 3 channels as (2, 1) on ranks, this is rank {comm.rank}"


@pytest.mark.ranks(2)
def test_bad_input(comm: AbstractCommunicator) -> None:
    conv = nn.Conv2d(4, 4, 3)
    with pytest.raises(InputError, match=r"channels=\[4\] has 1 entries for 2 ranks; give one for each"):
        ParallelConv(conv, comm, channels=[4])
    for channels in ([3, 2], [5, -1]):
        with pytest.raises(InputError, match="must be at least 0 and add up to the 4 output channels"):
            ParallelConv(conv, comm, channels=channels)
    with pytest.raises(InputError, match=r"channels=\[1, 3\] cuts a group of 2 output channels"):
        ParallelConv(nn.Conv2d(4, 4, 3, groups=2), comm, channels=[1, 3])
    with pytest.raises(InputError, match=rf"on rank {comm.rank}: input has the shape \(1, 3, 9, 9\); dimension -3 must be"):
        ParallelConv(conv, comm)(torch.zeros(1, 3, 9, 9))
    with pytest.raises(ModelError, match="conv has 2 groups, and grouped=True makes groups of its own"):
        ParallelConv(nn.Conv2d(4, 4, 3, groups=2), comm, grouped=True)
    with pytest.raises(ModelError, match="1 input channels are too few for a grouped convolution on 2 ranks"):
        ParallelConv(nn.Conv2d(1, 4, 3), comm, grouped=True)
    with pytest.raises(InputError, match="grouped=True divides the channels as ChainerMN does; leave channels out"):
        ParallelConv(conv, comm, grouped=True, channels=[1, 3])


@pytest.mark.parametrize("module", [nn.Linear(2, 2), nn.ConvTranspose2d(2, 2, 3), nn.LazyConv2d(2, 3)])
def test_other_modules_are_refused(module: Any) -> None:
    with pytest.raises(ModelError, match=rf"conv is a {type(module).__name__}; give an nn\.Conv1d, nn\.Conv2d or nn\.Conv3d"):
        ParallelConv(module, single_communicator())
