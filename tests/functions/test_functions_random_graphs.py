"""Random networks over ranks: any order of messages and collectives, used in any order or not at all, against one process."""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operations import OPERATIONS, rolled

from tatami import functions
from tatami.comm import AbstractCommunicator
from tatami.testing.worlds import World

WIDTH = 4


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of the whole network.

    Attributes:
        kind: `compute` on rank `here`; `send` from `here` to `there`; `recv` on `there` of the oldest such; a collective.
        here: a rank; the root of a collective that has one.
        there: the other rank.
        tag: of a message.
        picks: which of its tensors each rank uses, modulo how many it has.
    """

    kind: str
    here: int = 0
    there: int = 0
    tag: int = 0
    picks: tuple[int, ...] = (0, 0, 0, 0)


@dataclass(frozen=True, kw_only=True)
class Network:
    """Steps, and which of its tensors reach the loss of each rank: none where empty."""

    steps: tuple[Step, ...]
    used: tuple[tuple[int, ...], ...]


@st.composite
def networks(draw: st.DrawFn, size: int) -> Network:
    ranks = st.integers(0, size - 1)
    picks = st.tuples(*[st.integers(0, 9)] * 4)
    steps: list[Step] = []
    under_way: list[tuple[int, int, int]] = []
    for _ in range(draw(st.integers(1, 10))):
        kind = draw(st.sampled_from(("compute", "send", "send", "recv", "recv", "collective")))
        here, there, tag = draw(ranks), draw(ranks), draw(st.integers(0, 1))
        if kind == "send" and here != there:
            under_way.append((here, there, tag))
            steps.append(Step(kind="send", here=here, there=there, tag=tag, picks=draw(picks)))
        elif kind == "recv" and under_way:
            edge = under_way.pop(draw(st.integers(0, len(under_way) - 1)))
            steps.append(Step(kind="recv", here=edge[0], there=edge[1], tag=edge[2]))
        elif kind == "compute":
            steps.append(Step(kind="compute", here=here, picks=draw(picks)))
        elif kind == "collective":
            steps.append(Step(kind=draw(st.sampled_from(sorted(OPERATIONS))), here=here, picks=draw(picks)))
    for edge in draw(st.permutations(under_way)):
        steps.append(Step(kind="recv", here=edge[0], there=edge[1], tag=edge[2]))
    used = tuple(tuple(draw(st.lists(st.integers(0, 9), max_size=3))) for _ in range(size))
    return Network(steps=tuple(steps), used=used)


def start(rank: int) -> torch.Tensor:
    return torch.linspace(-1, 1 + rank, WIDTH, dtype=torch.float64).requires_grad_()


def computed(pool: Sequence[torch.Tensor], picks: Sequence[int]) -> torch.Tensor:
    a, b = pool[picks[0] % len(pool)], pool[picks[1] % len(pool)]
    return torch.sin(a + 0.3) * torch.cos(b)


def loss_of(pool: Sequence[torch.Tensor], used: Sequence[int]) -> torch.Tensor | None:
    terms = [(number + 1) * torch.tanh(pool[pick % len(pool)]).sum() for number, pick in enumerate(used)]
    return torch.stack(terms).sum() if terms else None


def run_alone(network: Network, size: int) -> tuple[float, list[torch.Tensor]]:
    """The sum of all losses, and the gradients of all ranks' inputs, on one process."""
    leaves = [start(rank) for rank in range(size)]
    pools = [[leaf] for leaf in leaves]
    messages: dict[tuple[int, int, int], deque[torch.Tensor]] = defaultdict(deque)
    for step in network.steps:
        picked = [pool[step.picks[rank] % len(pool)] for rank, pool in enumerate(pools)]
        root, edge = step.here, (step.here, step.there, step.tag)
        new: list[list[torch.Tensor]] = [[] for _ in range(size)]
        if step.kind == "compute":
            new[root] = [computed(pools[root], step.picks)]
        elif step.kind == "send":
            messages[edge].append(picked[root])
        elif step.kind == "recv":
            new[step.there] = [messages[edge].popleft()]
        else:
            new = [list(OPERATIONS[step.kind].expected(picked, rank, root, rolled)) for rank in range(size)]
        for pool, more in zip(pools, new, strict=True):
            pool += more
    losses = [loss for rank in range(size) if (loss := loss_of(pools[rank], network.used[rank])) is not None]
    if not losses:
        return 0.0, [torch.zeros(WIDTH, dtype=torch.float64) for _ in leaves]
    total = torch.stack(losses).sum()
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    return total.item(), [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, grads, strict=True)]


def run_here(network: Network, comm: AbstractCommunicator, *, plain: bool) -> tuple[float, torch.Tensor]:
    """This rank's loss, and the gradient of its input; `plain`: by `loss.backward()`, wherever that is enough."""
    rank = comm.rank
    leaf = start(rank)
    pool = [leaf]
    touched = [False]
    for step in network.steps:
        x, root = pool[step.picks[rank] % len(pool)], step.here
        if step.kind == "compute":
            if rank == root:
                touched.append(any(touched[pick % len(pool)] for pick in step.picks[:2]))
                pool.append(computed(pool, step.picks))
        elif step.kind == "send":
            if rank == root:
                functions.send(x, comm, dest=step.there, tag=step.tag)
        elif step.kind == "recv":
            if rank == step.there:
                pool.append(functions.recv(comm, source=step.here, tag=step.tag))
        else:
            pool += OPERATIONS[step.kind].call(x, comm, root, rolled)
        # All that was not computed here came from other ranks, or from a collective.
        touched += [True] * (len(pool) - len(touched))
    loss = loss_of(pool, network.used[rank])
    if plain and loss is not None and any(touched[pick % len(pool)] for pick in network.used[rank]):
        loss.backward()  # type: ignore[no-untyped-call]
    else:
        functions.backward(loss)
    return 0.0 if loss is None else loss.item(), torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("plain", [False, True])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_random_networks(world: World, plain: bool, data: st.DataObject) -> None:
    network = data.draw(networks(world.size))
    total, grads = run_alone(network, world.size)
    results = world(lambda comm: run_here(network, comm, plain=plain))
    assert sum(loss for loss, _ in results) == pytest.approx(total, abs=1e-10)
    for grad, (_, got) in zip(grads, results, strict=True):
        torch.testing.assert_close(got, grad, rtol=0, atol=1e-10)
