"""What iterations cost beside flop and bytes: the networks that tell it, and what is made of their times."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tatami.comm import AbstractCommunicator
from tatami.comm.link_probe import measure_message_costs
from tatami.model import overheads
from tatami.model.overheads import measure_overheads, messages_of, overheads_of, small_model
from tatami.testing.worlds import World
from tiled_rig import Placed, simple_layout

mse: Any = F.mse_loss  # as torch has no type for `backward`
seconds = st.floats(0.0, 1e-2)


@given(call_s=seconds, step_s=seconds, message_s=seconds, few=st.integers(2, 50), more=st.integers(1, 500))
def test_three_times_tell_three_costs(call_s: float, step_s: float, message_s: float, few: int, more: int) -> None:
    messages = [few, few, few + more]
    spent_s = [step_s + blocks * call_s + count * message_s for blocks, count in zip((1, 4, 4), messages, strict=True)]
    found = overheads_of(spent_s, messages=messages)
    assert found.call_s == pytest.approx(call_s, abs=1e-9)
    assert found.message_s == pytest.approx(message_s, abs=1e-9)
    assert found.step_s == pytest.approx(step_s, abs=1e-6)


def test_what_noise_makes_negative_is_nothing() -> None:
    found = overheads_of([3e-3, 2e-3, 1e-3], messages=[8, 8, 20])
    assert (found.call_s, found.message_s, found.step_s) == (0.0, 0.0, 3e-3)
    assert overheads_of([3e-3, 6e-3, 6e-3], messages=[0, 0, 0]).message_s == 0.0


@pytest.mark.parametrize("messages", [[8, 8, 20], [0, 0, 0]])
def test_a_message_takes_no_less_than_one_of_a_burst(messages: list[int]) -> None:
    found = overheads_of([3e-3, 3e-3, 1e-3], messages=messages, least_message_s=1e-4)
    assert found.message_s == 1e-4
    assert found.step_s == pytest.approx(3e-3 - messages[0] * 1e-4)
    assert overheads_of([3e-3, 3e-3, 9e-3], messages=[8, 8, 20], least_message_s=1e-4).message_s == pytest.approx(5e-4)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("is_row", [True, False])
def test_an_iteration_has_the_messages_that_it_is_divided_by(world: World, is_row: bool, blocks: int) -> None:
    size = world.size
    layout = simple_layout(*([rank] for rank in range(size))) if is_row else simple_layout(list(range(size)))

    def body(comm: AbstractCommunicator) -> tuple[float, int]:
        apart = Placed(comm, hosts=tuple(f"host-{rank}" for rank in range(size)))
        model = small_model(apart, layout, blocks=blocks)
        x, y = model.local(torch.zeros(2 * size, 2 * size), torch.zeros(2 * size, 2 * size))
        mse(model(x), y).backward()  # the ranks compare their batches in the first pass
        x, y = model.local(torch.zeros(2 * size, 2 * size), torch.zeros(2 * size, 2 * size))
        mse(model(x), y).backward()
        x, y = model.local(torch.zeros(2 * size, 2 * size), torch.zeros(2 * size, 2 * size))
        parts = [each for each in (model.comm, model._replica.comm) if isinstance(each, Placed)]

        def num_messages() -> int:
            return sum(each.num_messages(name) for each in parts for name in ("isend", "irecv"))

        before = num_messages()
        mse(model(x), y).backward()
        return messages_of(model), num_messages() - before

    for counted, sent in world(body):
        assert counted == sent


@pytest.mark.ranks(1, 2, 3)
def test_it_is_measured_and_all_ranks_are_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """In groups of two, where there are more."""
    monkeypatch.setattr(overheads, "_TOGETHER", 2)

    def body(comm: AbstractCommunicator) -> None:
        before = torch.get_rng_state()
        found = measure_overheads(comm, measure_message_costs(comm, repeats=2), repeats=2)
        assert torch.equal(torch.get_rng_state(), before)
        assert comm.allgather_object(found) == [found] * comm.size
        for each in found:
            # A message is never for nothing, however noisy the machine; of the others, one may look so.
            assert each.message_s > 0 or comm.size == 1
            assert min(each.call_s, each.step_s) >= 0
            assert 0 < each.call_s + each.step_s + each.message_s < 100

    world(body)
