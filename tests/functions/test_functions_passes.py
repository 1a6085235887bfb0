"""Several passes in flight on one communicator, passes that are over, retained and abandoned ones."""

from collections.abc import Callable

import pytest
import torch
from test_functions_traps import grad_of, scalar
from torch import nn

from tatami import functions
from tatami.comm import AbstractCommunicator
from tatami.errors import ClosedError, CommError, CommTimeoutError
from tatami.functions import chain as chain_module
from tatami.functions import inbox as inbox_module
from tatami.functions import outbox as outbox_module
from tatami.parallel import MultiNodeChainList
from tatami.testing.worlds import World

pytestmark = pytest.mark.ranks(2)

NUM_MICRO_BATCHES = 4


# -- passes that are over --------------------------------------------------------------------------------------------------


def sends_three(comm: AbstractCommunicator) -> list[float]:
    """Rank 0 sends one, two and three times a tensor, and runs backward; returns its gradient."""
    x = torch.ones(2, requires_grad=True)
    for factor in (1, 2, 3):
        functions.send(factor * x, comm, dest=1)
    functions.backward()
    assert x.grad is not None
    return x.grad.tolist()


@pytest.mark.parametrize("end", [torch.Tensor.backward, functions.backward])
def test_a_second_loss_of_a_pass_that_is_over_is_refused(
    comm: AbstractCommunicator, end: Callable[[torch.Tensor], None]
) -> None:
    if comm.rank == 0:
        assert sends_three(comm) == [1.0, 1.0]
        return
    losses = [functions.recv(comm, source=0).sum() for _ in range(3)]
    end(losses[0])
    for loss in losses[1:]:
        with pytest.raises(CommError, match=r"recv at .*functions_passes.py:\d+ comes to a pass that is over"):
            end(loss)


def test_one_backward_over_all_losses_gives_the_whole_gradient(comm: AbstractCommunicator) -> None:
    """What the error of the test above says to do."""
    if comm.rank == 0:
        assert sends_three(comm) == [6.0, 6.0]
        return
    losses = [functions.recv(comm, source=0).sum() for _ in range(3)]
    torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]


def test_each_side_may_run_the_same_backward_twice_if_it_is_retained(comm: AbstractCommunicator) -> None:
    if comm.rank == 0:
        x = scalar(1)
        functions.send(x, comm, dest=1)
        functions.backward(retain_graph=True)
        functions.backward()
        functions.backward()  # nothing is left
        assert grad_of(x) == 5
        return
    y = functions.recv(comm, source=0)
    functions.backward(2 * y, retain_graph=True)
    functions.backward(3 * y)
    with pytest.raises(CommError, match="comes to a pass that is over"):
        functions.backward(4 * y)


def test_a_loss_that_has_nothing_to_do_with_a_retained_pass_leaves_it_alone(comm: AbstractCommunicator) -> None:
    x, w = scalar(1), scalar(3)
    y = functions.allreduce(x, comm)
    functions.backward(2 * y, retain_graph=True)
    (w**2).backward()  # type: ignore[no-untyped-call]
    functions.backward(3 * y)
    assert (grad_of(x), grad_of(w)) == (10.0, 6.0)


def test_each_of_two_passes_may_be_run_again_where_it_is_retained(comm: AbstractCommunicator) -> None:
    x, passes, losses = scalar(2 + comm.rank), [functions.Pass(), functions.Pass()], []
    for number, one in enumerate(passes):
        with one:
            arrived = functions.sendrecv((number + 1) * x, comm, dest=1 - comm.rank, source=1 - comm.rank)
            losses.append(arrived**2)
    for retains in (True, False):
        for one, loss in zip(passes, losses, strict=True):
            one.backward(loss, retain_graph=retains)
    assert grad_of(x) == 2 * sum(2 * number**2 * (2 + comm.rank) for number in (1, 2))


@pytest.mark.threads_only
def test_a_backward_that_one_rank_leaves_out_is_noticed_in_the_next_pass(world: World) -> None:
    def body(comm: AbstractCommunicator) -> str:
        x = scalar(1)
        if comm.rank == 0:
            functions.send(x, comm, dest=1)
        else:
            functions.backward(functions.recv(comm, source=0) ** 2, retain_graph=True)
        functions.backward(retain_graph=comm.rank == 0)
        with pytest.raises(CommError) as told:  # noqa: PT012 -- which of them raises depends on what comes first
            functions.allreduce(x, comm).backward()
            functions.allreduce(x, comm).backward()
        return str(told.value)

    assert all("rank 1 ran backward through a pass more often than rank 0" in text for text in world(body))


@pytest.mark.ranks(3)
def test_two_losses_of_one_pass_of_which_one_touches_nothing(comm: AbstractCommunicator) -> None:
    x = scalar(2)
    if comm.rank == 0:
        functions.send(3 * x, comm, dest=1)
        functions.send(2 * x, comm, dest=2)
        first, second = functions.recv(comm, source=2) ** 2, x**3
    elif comm.rank == 1:
        arrived = functions.recv(comm, source=0)
        first, second = arrived**2, arrived**3
    else:
        arrived = functions.recv(comm, source=0)
        functions.send(5 * x, comm, dest=0)
        first, second = arrived**2, x**3
    functions.backward(first, retain_graph=True)
    functions.backward(second)
    expected = {0: 3 * 4 + 2 * 9 * 2 + 3 * 27 * 4 + 2 * 4 * 2, 1: None, 2: 2 * 25 * 2 + 3 * 4}[comm.rank]
    assert (None if x.grad is None else x.grad.item()) == expected


def test_a_retained_pass_is_not_run_again_with_the_next_one(comm: AbstractCommunicator) -> None:
    if comm.rank == 0:
        x, z = scalar(1), scalar(1)
        functions.send(x, comm, dest=1)
        functions.backward(retain_graph=True)
        functions.send(z, comm, dest=1)
        functions.backward()
        assert (grad_of(x), grad_of(z)) == (1, 7)
        return
    functions.recv(comm, source=0).backward(retain_graph=True)
    (7 * functions.recv(comm, source=0)).backward()


# -- several passes in flight ------------------------------------------------------------------------------------------------


def pipeline(comm: AbstractCommunicator, schedule: Callable[[int, int], list[tuple[str, int]]]) -> list[float]:
    """A network of one weight for each rank, with the loss on the last; returns this rank's gradient after each backward."""
    weight = scalar(comm.rank + 2)
    passes: dict[int, functions.Pass] = {}
    losses: dict[int, torch.Tensor] = {}
    grads = []
    last = comm.size - 1
    for what, number in schedule(comm.rank, comm.size):
        if what == "forward":
            with functions.Pass() as passes[number]:
                x = torch.tensor(float(number + 1), dtype=torch.float64)
                h = weight * (x if comm.rank == 0 else functions.recv(comm, source=comm.rank - 1))
                if comm.rank < last:
                    functions.send(h, comm, dest=comm.rank + 1)
                else:
                    losses[number] = (number + 1) * h**2
        elif comm.rank < last:
            passes[number].backward()
            grads.append(grad_of(weight))
        else:
            losses[number].backward()  # type: ignore[no-untyped-call]
            grads.append(grad_of(weight))
    return grads


def all_forward_first(rank: int, size: int) -> list[tuple[str, int]]:  # noqa: ARG001
    numbers = range(NUM_MICRO_BATCHES)
    return [("forward", number) for number in numbers] + [("backward", number) for number in numbers]


def last_pass_first(rank: int, size: int) -> list[tuple[str, int]]:  # noqa: ARG001
    numbers = range(NUM_MICRO_BATCHES)
    return [("forward", number) for number in numbers] + [("backward", number) for number in reversed(numbers)]


def one_forward_one_backward(rank: int, size: int) -> list[tuple[str, int]]:
    ahead = min(size - 1 - rank, NUM_MICRO_BATCHES)
    steps = [("forward", number) for number in range(ahead)]
    for number in range(NUM_MICRO_BATCHES):
        if number + ahead < NUM_MICRO_BATCHES:
            steps.append(("forward", number + ahead))
        steps.append(("backward", number))
    return steps


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("schedule", [all_forward_first, last_pass_first, one_forward_one_backward])
def test_micro_batches_in_flight(world: World, schedule: Callable[[int, int], list[tuple[str, int]]]) -> None:
    """The loss of number m is (m + 1) (x_m w_0 w_1 ...)^2, x_m = m + 1; its gradient of w is twice it, over w."""
    product = torch.arange(2.0, world.size + 2, dtype=torch.float64).prod().item()
    order = [number for what, number in schedule(0, world.size) if what == "backward"]
    losses = [(number + 1) * ((number + 1) * product) ** 2 for number in order]
    for rank, grads in enumerate(world(lambda comm: pipeline(comm, schedule))):
        expected = [sum(2 * loss / (rank + 2) for loss in losses[: done + 1]) for done in range(NUM_MICRO_BATCHES)]
        assert grads == pytest.approx(expected)


def test_a_rank_without_a_loss_ends_all_passes_in_flight_by_one_backward(comm: AbstractCommunicator) -> None:
    if comm.rank == 0:
        x = torch.ones(2, requires_grad=True)
        for factor in (1, 2, 3):
            with functions.Pass():
                functions.send(factor * x, comm, dest=1)
        functions.backward()
        assert x.grad is not None
        assert x.grad.tolist() == [6.0, 6.0]
        return
    losses = []
    for _ in range(3):
        with functions.Pass():
            losses.append(functions.recv(comm, source=0).sum())
    for loss in losses:
        loss.backward()


def test_functions_backward_of_a_loss_runs_the_pass_that_it_belongs_to(comm: AbstractCommunicator) -> None:
    """What another pass has received and not used so far is still there afterwards."""
    passes = [functions.Pass(), functions.Pass()]
    xs = [scalar(1), scalar(2)]
    ys = []
    for one, x in zip(passes, xs, strict=True):
        with one:
            ys.append(functions.sendrecv(x, comm, dest=1 - comm.rank, source=1 - comm.rank))
            functions.send(x, comm, dest=1 - comm.rank)
            functions.recv(comm, source=1 - comm.rank)
    functions.backward(10 * ys[1])
    before = [x.grad is None for x in xs]
    with passes[0]:
        functions.backward(100 * ys[0])
    assert before == [True, False]
    assert [grad_of(x) for x in xs] == [100.0, 10.0]


def test_a_pass_spans_communicators_and_may_be_entered_again(comm: AbstractCommunicator) -> None:
    other = comm.split(0)
    assert other is not None
    xs = [scalar(1), scalar(2)]
    passes = [functions.Pass(), functions.Pass()]
    totals = []
    for one, x in zip(passes, xs, strict=True):
        with one:
            totals.append(functions.allreduce(x, comm))
    for number, one in enumerate(passes):
        with one:
            totals[number] = functions.allreduce(totals[number], other)
    for one, total in zip(passes, totals, strict=True):
        one.backward(3 * total)
    comm.barrier()
    other.close()
    assert [grad_of(x) for x in xs] == [12.0, 12.0]


def test_a_chain_list_in_micro_batches(comm: AbstractCommunicator) -> None:
    model = MultiNodeChainList(comm)
    layer = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(layer.weight, 2.0)
    if comm.rank == 0:
        model.add_link(layer, rank_out=1)
    else:
        model.add_link(layer, rank_in=0)
    passes, outputs = [functions.Pass() for _ in range(3)], []
    for number, one in enumerate(passes):
        with one:
            outputs.append(model(torch.full((1, 1), number + 1.0, dtype=torch.float64)))
    for one, output in zip(passes, outputs, strict=True):
        one.backward(output.sum() if comm.rank == 1 else None)
    assert layer.weight.grad is not None
    assert layer.weight.grad.flatten().tolist() == [2.0 * 6]


@pytest.mark.threads_only
def test_passes_must_correspond(world: World) -> None:
    """A message of one pass is received in another one than the message before it."""

    def body(comm: AbstractCommunicator) -> str:
        if comm.rank == 0:
            for _ in range(2):
                with functions.Pass():
                    functions.send(scalar(1), comm, dest=1)
            with pytest.raises(CommError) as told:
                functions.backward()
        else:
            with functions.Pass():
                functions.recv(comm, source=0)
                with pytest.raises(CommError) as told:
                    functions.recv(comm, source=0)
        return str(told.value)

    first, second = world(body)
    assert "several passes in flight" in second
    assert first == f"rank 1 found: {second}"


def test_the_gradient_of_a_pass_among_others(comm: AbstractCommunicator) -> None:
    passes, xs, ys = [functions.Pass(), functions.Pass()], [scalar(2), scalar(3)], []
    for one, x in zip(passes, xs, strict=True):
        with one:
            ys.append(functions.allreduce(x**2, comm))
    found = []
    for one, x, y in zip(passes, xs, ys, strict=True):
        with one:
            found.append(functions.grad(y, x)[0].item())
    assert found == [8.0, 12.0]


@pytest.mark.parametrize("retains", [False, True])
def test_a_loss_of_one_communicator_visits_what_was_sent_on_another(comm: AbstractCommunicator, retains: bool) -> None:
    """Each rank sends on one and receives on the other, so that its loss touches one chain of two."""
    other = comm.split(0)
    assert other is not None
    out, back = (other, comm) if comm.rank == 0 else (comm, other)
    x = scalar(2 + comm.rank)
    functions.send(5 * x, out, dest=1 - comm.rank)
    loss = functions.recv(back, source=1 - comm.rank) * x
    if retains:
        loss.backward(retain_graph=True)
    loss.backward()
    assert grad_of(x) == 2 * 5 * (2 + (1 - comm.rank)) * (1 + retains)
    comm.barrier()
    other.close()


@pytest.mark.parametrize("again", ["same", "fresh"])
def test_a_loss_that_touches_nothing_runs_again_through_what_was_retained(comm: AbstractCommunicator, again: str) -> None:
    x = scalar(2 + comm.rank)
    if comm.rank == 0:
        functions.send(5 * x, comm, dest=1)
        loss = x**2
    else:
        loss = functions.recv(comm, source=0) * x
    functions.backward(loss, retain_graph=True)
    functions.backward(x**2 if again == "fresh" and comm.rank == 0 else loss)
    assert grad_of(x) == 2 * (4 + 15 if comm.rank == 0 else 10)


# -- abandoned passes --------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, 3)
def test_a_forward_pass_abandoned_on_a_closed_communicator_is_forgotten(comm: AbstractCommunicator) -> None:
    other = comm.split(0)
    assert other is not None
    abandoned = functions.allreduce(scalar(1), other)
    comm.barrier()  # both have what was sent
    other.close()
    x = scalar(2)
    functions.allreduce(x, comm).backward()
    functions.allreduce(x, comm)
    functions.backward()
    functions.backward(functions.allreduce(x, comm))
    with pytest.raises(ClosedError, match=r"backward of allreduce at .*: this communicator was closed"):
        abandoned.backward()
    assert grad_of(x) == 2.0 * comm.size


# -- bounds ------------------------------------------------------------------------------------------------------------------


@pytest.mark.threads_only
def test_operations_that_no_backward_visits_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_module, "MOST_OPERATIONS", 5)

    def body(comm: AbstractCommunicator) -> str:
        with pytest.raises(CommError) as told:  # noqa: PT012 -- which of them raises is counted below
            for number in range(20):
                if comm.rank == 0:
                    functions.send(scalar(1), comm, dest=1)
                else:
                    functions.recv(comm, source=0)
                sent = number + 1
        assert sent == 5
        return str(told.value)

    for text in world(body):
        assert "5 operations on this communicator wait for a backward pass" in text


@pytest.mark.threads_only
def test_messages_that_are_not_received_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "MOST_UNSENT", 5)

    def body(comm: AbstractCommunicator) -> str:
        other = comm.split(0)
        assert other is not None
        other.timeout_s, sent, problem = 0.2, 0, ""
        if comm.rank == 0:
            with pytest.raises(CommTimeoutError) as told:  # noqa: PT012 -- which of them raises is counted below
                for number in range(20):
                    functions.send(torch.ones(1), other, dest=1)
                    sent = number + 1
            problem = str(told.value)
            assert sent == 5
        comm.barrier()
        return problem

    problem = world(body)[0]
    assert "send on rank 0 to rank 1: 5 messages of this rank are under way, and the oldest was not received for " in problem


def test_ranks_may_send_more_than_is_taken_at_once_before_they_receive(
    comm: AbstractCommunicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "MOST_UNSENT", 5)
    monkeypatch.setattr(inbox_module, "MOST_KEPT", 5)
    comm.barrier()
    with torch.no_grad():
        for number in range(9):
            functions.send(torch.tensor(float(number)), comm, dest=1 - comm.rank)
        assert [functions.recv(comm, source=1 - comm.rank).item() for _ in range(9)] == [float(number) for number in range(9)]


@pytest.mark.threads_only
@pytest.mark.parametrize(("limit", "value"), [("MOST_KEPT", 5), ("MOST_KEPT_BYTES", 40)])
def test_messages_that_are_not_asked_for_are_bounded(
    world: World, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(inbox_module, limit, value)

    def body(comm: AbstractCommunicator) -> str:
        with pytest.raises(CommError) as told:  # noqa: PT012 -- both ends of the same exchange
            if comm.rank == 0:
                for _ in range(20):
                    functions.send(torch.ones(2), comm, dest=1)
                functions.recv(comm, source=1)
            else:
                functions.recv(comm, source=0, tag=1)
        comm.barrier()
        return str(told.value)

    first, second = world(body)
    assert "rank 1 keeps 6 messages of 48 B that have come and that it has not asked for, the last one from rank 0" in second
    assert first == f"rank 1 found: {second}"
