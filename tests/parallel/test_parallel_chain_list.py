"""Chain lists: the topologies of ChainerMN's own tests and the traps found in it, with gradients compared to one process."""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from tatami import functions
from tatami.comm import AbstractCommunicator
from tatami.errors import InputError
from tatami.parallel import MultiNodeChainList
from tatami.testing.worlds import World

pytestmark = pytest.mark.ranks(2)

WIDTH, BATCH, STEPS = 4, 3, 2
Ranks = int | Sequence[int] | None


class A(nn.Module):
    """One input, or the sum of several."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, *xs: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(torch.stack(xs).sum(0))
        return y.tanh()


class Fork(nn.Module):
    """One input, a pair of outputs of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = A(), A()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(x), self.right(x)


class Join(nn.Module):
    """Pairs, which count differently; with `only` one member of each is used."""

    def __init__(self, only: int | None = None) -> None:
        super().__init__()
        self.left, self.right, self.only = A(), A(), only

    def forward(self, *pairs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if self.only is not None:
            return torch.stack([self.left(pair[self.only]) for pair in pairs]).sum(0)
        # The second one first: whoever matches gradients by the order of use swaps them.
        return torch.stack([100 * self.right(pair[1]) + 10 * self.left(pair[0]) for pair in pairs]).sum(0)


class Difference(nn.Module):
    """Two inputs that must not be confused."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = A()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.layer(3 * y - x)


@dataclass(kw_only=True)
class Part:
    """The arguments of `add_link`."""

    link: nn.Module
    rank_in: Ranks = None
    rank_out: Ranks = None
    tag_in: int | Sequence[int] = 0
    tag_out: int | Sequence[int] = 0


Topology = Callable[[int], list[list[Part]]]
"""The parts of each of so many ranks."""


def ring(size: int) -> list[list[Part]]:
    middle = [[Part(link=A(), rank_in=rank - 1, rank_out=rank + 1)] for rank in range(1, size - 1)]
    return [[Part(link=A(), rank_out=1)], *middle, [Part(link=A(), rank_in=size - 2)]]


def cycle(size: int) -> list[list[Part]]:
    first = [Part(link=A(), rank_out=1 % size), Part(link=A(), rank_in=size - 1)]
    return [first, *[[Part(link=A(), rank_in=rank - 1, rank_out=(rank + 1) % size)] for rank in range(1, size)]]


def crossing(size: int) -> list[list[Part]]:
    def parts(rank: int) -> list[Part]:
        sends = Part(link=A(), rank_out=(rank + 1) % size)
        gets = Part(link=A(), rank_in=(rank - 1) % size)
        return [sends, gets] if rank == 0 else [gets, sends]

    return [parts(rank) for rank in range(size)]


def branching(order: Callable[[list[int]], list[int]]) -> Topology:
    def topology(size: int) -> list[list[Part]]:
        ranks = order(list(range(1, size)))
        own = [Part(link=A(), rank_in=0, rank_out=0)] if 0 in ranks else []
        parent = [Part(link=A(), rank_out=ranks), *own, Part(link=A(), rank_in=ranks)]
        return [parent, *[[Part(link=A(), rank_in=0, rank_out=0)] for _ in range(1, size)]]

    return topology


def twisting(size: int) -> list[list[Part]]:
    def inner(rank: int) -> list[Part]:
        return [
            Part(link=A(), rank_in=rank - 1, rank_out=rank),
            Part(link=A(), rank_out=rank - 1),
            Part(link=A(), rank_out=rank + 1),
            Part(link=A(), rank_in=rank + 1, rank_out=rank),
            Part(link=Difference(), rank_in=[rank, rank]),
        ]

    first = [Part(link=A(), rank_out=1), Part(link=A(), rank_in=1)]
    last = [Part(link=A(), rank_in=size - 2), Part(link=A(), rank_out=size - 2)]
    return [first, *[inner(rank) for rank in range(1, size - 1)], last]


def tuple_pairs(size: int) -> list[list[Part]]:
    """Ranks 2m and 2m + 1; a last one without a partner has nothing to do."""
    parts: list[list[Part]] = [[] for _ in range(size)]
    for parent in range(0, size - 1, 2):
        parts[parent] = [Part(link=Fork(), rank_out=parent + 1), Part(link=A(), rank_in=parent + 1)]
        parts[parent + 1] = [Part(link=Join(), rank_in=parent, rank_out=parent)]
    return parts


def tuple_to_all(size: int) -> list[list[Part]]:
    """ChainerMN: a TypeError here, and a deadlock there."""
    everyone = list(range(size))
    back = [Part(link=Join(), rank_in=0, rank_out=0)]
    root = [Part(link=Fork(), rank_out=everyone), *back, Part(link=A(), rank_in=everyone)]
    return [root, *[deepcopy(back) for _ in range(1, size)]]


def unused_members(size: int) -> list[list[Part]]:
    """ChainerMN: a ValueError on the receiver, and a deadlock on the sender."""
    first = [Part(link=Fork(), rank_out=list(range(1, size)))]
    return [first, *[[Part(link=Join(only=rank % 2), rank_in=0)] for rank in range(1, size)]]


def several_inputs_later(size: int) -> list[list[Part]]:
    """ChainerMN: too many values to unpack. All inputs of the model for parts that are not the first."""
    first = [Part(link=Difference(), rank_out=1), Part(link=Difference(), rank_out=0), Part(link=Difference(), rank_in=[1, 0])]
    second = [Part(link=A(), rank_in=0, rank_out=0)]
    return [first, second, *[[Part(link=Difference(), rank_out=rank), Part(link=A(), rank_in=rank)] for rank in range(2, size)]]


def output_beside_a_send(size: int) -> list[list[Part]]:
    """No output depends on what other ranks sent, and the one of rank 0 is that of a middle part."""
    first = [Part(link=A(), rank_out=1), Part(link=A()), Part(link=A(), rank_out=size - 1)]
    last = [Part(link=A(), rank_in=0)]
    if size == 2:
        return [first, [Part(link=Difference(), rank_in=[0, 0])]]
    return [first, last, *[[Part(link=A())] for _ in range(2, size - 1)], deepcopy(last)]


def tags(size: int) -> list[list[Part]]:
    """Two edges of the same ranks, received in the other order; and two own edges, taken in the other order."""
    first = [
        Part(link=A(), rank_out=[1, 1, 0], tag_out=[7, 4_000_000_000, 3]),
        Part(link=A(), rank_out=0, tag_out=5),
        Part(link=Difference(), rank_in=[0, 0], tag_in=[5, 3], rank_out=1, tag_out=2),
    ]
    second = [
        Part(link=Difference(), rank_in=[0, 0], tag_in=[2, 7], rank_out=1),
        Part(link=Difference(), rank_in=[1, 0], tag_in=[0, 4_000_000_000]),
    ]
    return [first, second, *[[Part(link=A())] for _ in range(2, size)]]


TOPOLOGIES: dict[str, Topology] = {
    "ring": ring,
    "cycle": cycle,
    "crossing": crossing,
    "branching1": branching(lambda children: children),
    "branching2": branching(lambda children: [0, *children]),
    "branching3": branching(lambda children: [*children, 0]),
    "branching4": branching(lambda children: [*children[1:], 0, *children[:1]]),
    "twisting": twisting,
    "tuple_pairs": tuple_pairs,
    "tuple_to_all": tuple_to_all,
    "unused_members": unused_members,
    "several_inputs_later": several_inputs_later,
    "output_beside_a_send": output_beside_a_send,
    "tags": tags,
}
INPUTS = {"several_inputs_later": 2}
ALONE = ("cycle", "crossing", "branching2", "branching3", "branching4", "tuple_to_all")
"""Those that one rank can have, with edges to itself alone."""


def many(values: Any) -> list[Any]:
    return [values] if isinstance(values, int) else list(values)


def edges(ranks: Ranks, tags: int | Sequence[int]) -> list[tuple[int, int]]:
    if ranks is None:
        return []
    each = many(ranks)
    return list(zip(each, many(tags) * len(each) if isinstance(tags, int) else many(tags), strict=True))


def in_one_process(network: list[list[Part]], inputs: list[list[torch.Tensor]]) -> list[Any]:
    """The outputs of all ranks: whichever part has its inputs is next."""
    outputs: list[Any] = [None] * len(network)
    left = [list(parts) for parts in network]
    queues: defaultdict[tuple[int, int, int], deque[Any]] = defaultdict(deque)
    while any(left):
        before = sum(map(len, left))
        for rank, parts in enumerate(left):
            if not parts:
                continue
            sources = [(source, rank, tag) for source, tag in edges(parts[0].rank_in, parts[0].tag_in)]
            if any(len(queues[source]) < sources.count(source) for source in sources):
                continue
            part = parts.pop(0)
            result = part.link(*([queues[source].popleft() for source in sources] or inputs[rank]))
            if part.rank_out is None:
                outputs[rank] = result
            for dest, tag in edges(part.rank_out, part.tag_out):
                queues[rank, dest, tag].append(result)
        assert sum(map(len, left)) < before, "no part has its inputs"
    assert not any(queues.values())
    return outputs


def loss_of(output: torch.Tensor, rank: int) -> torch.Tensor:
    return (output.sin() * torch.arange(1.0, WIDTH + 1, dtype=torch.float64) * (rank + 1)).sum()


def gradients(model: nn.Module, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    return [*[parameter.grad for parameter in model.parameters()], *[x.grad for x in inputs]]


def check_against_one_process(world: World, name: str, *, by_delegate: bool) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        network = TOPOLOGIES[name](world.size)
        shape = (BATCH, WIDTH)
        data = [[torch.randn(shape, dtype=torch.float64) for _ in range(INPUTS.get(name, 1))] for _ in range(world.size)]
    together = [nn.ModuleList(deepcopy(part.link) for part in parts) for parts in network]
    plain = [
        [Part(**{**part.__dict__, "link": link}) for part, link in zip(parts, links, strict=True)]
        for parts, links in zip(network, together, strict=True)
    ]
    leaves = [[x.clone().requires_grad_() for x in xs] for xs in data]
    for _ in range(STEPS):
        outputs = in_one_process(plain, leaves)
        torch.stack([loss_of(y, rank) for rank, y in enumerate(outputs) if y is not None]).sum().backward()  # type: ignore[no-untyped-call]

    def body(comm: AbstractCommunicator) -> tuple[Any, list[torch.Tensor | None]]:
        parts, inputs = network[comm.rank], [x.clone().requires_grad_() for x in data[comm.rank]]
        if not parts:
            return None, [None for _ in inputs]
        model = MultiNodeChainList(comm)
        for part in parts:
            model.add_link(
                deepcopy(part.link), rank_in=part.rank_in, rank_out=part.rank_out, tag_in=part.tag_in, tag_out=part.tag_out
            )
        result: Any = None
        for _ in range(STEPS):
            result = model(*inputs)
            if any(part.rank_out is None for part in parts):
                loss_of(result, comm.rank).backward()  # type: ignore[no-untyped-call]
            else:
                assert (result.shape, result.item()) == ((), 0)  # a delegate
                if by_delegate:
                    result.backward()
                else:
                    functions.backward()
                result = None
        return result, gradients(model, inputs)

    ran = world(body)
    for rank, (output, grads) in enumerate(ran):
        torch.testing.assert_close(output, outputs[rank], rtol=0, atol=1e-10) if output is not None else None
        assert (output is None) == (outputs[rank] is None)
        expected = gradients(together[rank], leaves[rank])
        assert len(grads) == len(expected)
        for got, wanted in zip(grads, expected, strict=True):
            # What one process finds unused has no gradient there; a message that nobody used comes back as zeros.
            wanted = torch.zeros_like(got) if wanted is None and got is not None else wanted
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)
    assert any(grad is not None and grad.abs().max() > 1e-3 for _, grads in ran for grad in grads)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", sorted(TOPOLOGIES))
def test_gradients_are_those_of_one_process(world: World, name: str) -> None:
    check_against_one_process(world, name, by_delegate=False)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", ["cycle", "branching2", "tuple_pairs"])
def test_ranks_without_an_output_may_go_back_from_the_delegate(world: World, name: str) -> None:
    check_against_one_process(world, name, by_delegate=True)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", ALONE)
def test_one_rank_alone(world: World, name: str) -> None:
    check_against_one_process(world, name, by_delegate=False)


def test_a_model_whose_outputs_are_a_structure(world: World) -> None:
    """A loss of one member alone, which depends on nothing received, still brings backward to what was sent."""

    class Spread(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"used": (2 * x, None), "unused": [3 * x], "note": "a text"}

    def body(comm: AbstractCommunicator) -> float | None:
        model = MultiNodeChainList(comm)
        if comm.rank == 1:
            model.add_link(nn.Identity(), rank_in=0)
            (5 * model()).sum().backward()
            return None
        x = torch.ones(2, dtype=torch.float64, requires_grad=True)
        model.add_link(nn.Identity(), rank_out=1)
        model.add_link(Spread())
        output = model(x)
        assert output["note"] == "a text"
        output["used"][0].sum().backward()
        assert x.grad is not None
        return x.grad[0].item()

    assert world(body)[0] == 7


@pytest.mark.ranks(2, 3)
def test_evaluation_without_gradients(world: World) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        network = cycle(world.size)
        x = torch.randn(BATCH, WIDTH, dtype=torch.float64)
    expected = in_one_process(network, [[x]] * world.size)[0]

    def body(comm: AbstractCommunicator) -> torch.Tensor:
        model = MultiNodeChainList(comm)
        for part in network[comm.rank]:
            model.add_link(part.link, rank_in=part.rank_in, rank_out=part.rank_out)
        with torch.no_grad():
            output: torch.Tensor = model(x)
        assert not output.requires_grad
        return output

    torch.testing.assert_close(world(body)[0], expected, rtol=0, atol=1e-12)


def test_copies_share_the_communicator_and_nothing_else(comm: AbstractCommunicator) -> None:
    model = MultiNodeChainList(comm)
    model.add_link(nn.Linear(2, 2), rank_in=comm.rank)
    twin = deepcopy(model)
    assert twin.comm is comm
    assert twin.links[0] is not model.links[0]
    twin.links.append(nn.Identity())
    assert len(model.links) == 1
    assert list(model.state_dict()) == ["links.0.weight", "links.0.bias"]


def test_bad_parts_are_refused_as_they_are_added(comm: AbstractCommunicator) -> None:
    model = MultiNodeChainList(comm)
    with pytest.raises(InputError, match="rank_out=2: there is no such rank; this communicator has ranks 0 to 1"):
        model.add_link(nn.Identity(), rank_out=2)
    with pytest.raises(InputError, match="rank_in=-1: there is no such rank"):
        model.add_link(nn.Identity(), rank_in=[0, -1])
    with pytest.raises(InputError, match="rank_in='0' is a str; give a rank"):
        model.add_link(nn.Identity(), rank_in=["0"])  # type: ignore[list-item]
    with pytest.raises(InputError, match="rank_out is empty; name at least one rank"):
        model.add_link(nn.Identity(), rank_out=[])
    with pytest.raises(InputError, match=r"tag_out=\[1, 2, 3\] has 3 entries for 2 ranks"):
        model.add_link(nn.Identity(), rank_out=[0, 1], tag_out=[1, 2, 3])
    with pytest.raises(InputError, match="tag_in: tag -1 is not between 0 and 4294967295"):
        model.add_link(nn.Identity(), rank_in=0, tag_in=-1)
    model.add_link(nn.Identity())
    with pytest.raises(InputError, match=f"part 1 is the second without rank_out on rank {comm.rank}"):
        model.add_link(nn.Identity(), rank_in=0)
    assert len(model.links) == 1


def test_own_edges_that_do_not_fit_are_refused_before_anything_is_sent(comm: AbstractCommunicator) -> None:
    here, there = comm.rank, 1 - comm.rank
    with pytest.raises(InputError, match=f"has no parts on rank {here}"):
        MultiNodeChainList(comm)()
    early = MultiNodeChainList(comm)
    early.add_link(nn.Identity(), rank_out=there)
    early.add_link(nn.Identity(), rank_in=here, rank_out=here)
    with pytest.raises(InputError, match=f"part 1 takes an input from its own rank {here} with tag 0, but no part before"):
        early(torch.ones(1))
    left = MultiNodeChainList(comm)
    left.add_link(nn.Identity(), rank_out=[there, here], tag_out=[0, 9])
    with pytest.raises(InputError, match=f"1 outputs to the own rank {here} with tag 9 are taken by no later part"):
        left(torch.ones(1))
    right = MultiNodeChainList(comm)
    right.add_link(nn.Identity(), rank_out=there)
    right.add_link(nn.Identity(), rank_in=there)
    assert right(torch.full((1,), float(here))).item() == there
