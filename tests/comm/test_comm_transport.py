"""How tensors of devices travel: the decision is pure, and says why."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tatami.cluster.device_choice import choose_device
from tatami.comm.transport import DevicePlace, Transport, choose_route, describe_route
from tatami.errors import InputError


def card(number: int, *, host: str = "a", has_nccl: bool = True, mpi_takes_cuda: bool = False) -> DevicePlace:
    return DevicePlace(
        host=host, kind="cuda", card=f"{host}-{number}", name="RTX", has_nccl=has_nccl, mpi_takes_cuda=mpi_takes_cuda
    )


CPU = DevicePlace(host="a")


@st.composite
def place(draw: st.DrawFn) -> DevicePlace:
    if draw(st.integers(0, 5)) == 0:
        return CPU
    made = card(draw(st.integers(0, 7)), host=draw(st.sampled_from("abc")), has_nccl=draw(st.integers(0, 9)) > 0)
    return replace(made, mpi_takes_cuda=draw(st.booleans()))


@given(st.lists(place(), min_size=1, max_size=6))
def test_nccl_is_taken_by_ranks_with_cards_of_their_own_and_by_no_others(places: list[DevicePlace]) -> None:
    own_cards = all(each.kind == "cuda" for each in places) and len({each.card for each in places}) == len(places)
    has_nccl = all(each.has_nccl for each in places)
    route = choose_route(places)
    assert (route.transport is Transport.NCCL) == (len(places) > 1 and own_cards and has_nccl)
    if route.transport is Transport.MPI:
        assert own_cards
        assert all(each.mpi_takes_cuda for each in places)
    assert route.why


@given(st.lists(place(), min_size=1, max_size=6), st.randoms())
def test_the_order_of_the_ranks_does_not_matter(places: list[DevicePlace], chance: object) -> None:
    mixed = list(places)
    chance.shuffle(mixed)  # type: ignore[attr-defined]
    assert choose_route(mixed).transport is choose_route(places).transport


@given(st.lists(place(), min_size=1, max_size=6), place())
def test_a_rank_more_never_makes_a_way_that_some_could_not_take(places: list[DevicePlace], more: DevicePlace) -> None:
    if choose_route([*places, more]).transport is Transport.NCCL and len(places) > 1:
        assert choose_route(places).transport is Transport.NCCL


def test_a_rank_on_a_cpu_is_named() -> None:
    route = choose_route([card(0), card(1), CPU])
    assert route.transport is Transport.HOST
    assert route.why == "rank 2 of 3 computes on a CPU"


def test_two_ranks_on_one_card_go_through_the_host_with_a_hint() -> None:
    route = choose_route([card(0), card(1), card(1)])
    assert route.transport is Transport.HOST
    assert route.why == "ranks 1, 2 share one card, and NCCL takes one rank a card"
    assert route.hint == "start as many ranks on each host as it has cards"


def test_mpi_is_taken_only_where_the_library_says_so() -> None:
    without = [card(0, has_nccl=False), card(1, has_nccl=False)]
    assert choose_route(without).transport is Transport.HOST
    assert "torchrun" in choose_route(without).hint
    assert choose_route([replace(each, mpi_takes_cuda=True) for each in without]).transport is Transport.MPI
    assert choose_route([without[0], replace(without[1], mpi_takes_cuda=True)]).transport is Transport.HOST


def test_a_device_of_another_kind_goes_through_the_host() -> None:
    route = choose_route([card(0), replace(card(1), kind="xpu")])
    assert (route.transport, route.why) == (Transport.HOST, "rank 1: a device of kind 'xpu'")


def test_it_is_told_in_sentences() -> None:
    places = [card(0), card(0), CPU]
    assert describe_route(places, choose_route(places), library="gloo") == (
        "3 ranks by gloo. RTX: ranks 0, 1; cpu: rank 2. Tensors go through host memory: rank 2 of 3 computes on a CPU."
    )


@given(st.integers(0, 20), st.integers(0, 8))
def test_auto_gives_each_card_to_one_rank(num_ranks: int, num_cards: int) -> None:
    devices = [choose_device("auto", local_rank=rank, num_cards=num_cards) for rank in range(num_ranks)]
    cards = [device for device in devices if device != "cpu"]
    assert len(cards) == len(set(cards)) == min(num_ranks, num_cards)


def test_cuda_shares_the_cards_in_turn() -> None:
    devices = [choose_device("cuda", local_rank=rank, num_cards=2) for rank in range(3)]
    assert devices == ["cuda:0", "cuda:1", "cuda:0"]
    assert choose_device("cuda:1", local_rank=5, num_cards=2) == "cuda:1"
    assert choose_device("cpu", local_rank=0, num_cards=2) == "cpu"


@pytest.mark.parametrize(
    ("request_", "num_cards", "said"),
    [
        ("cuda", 0, "torch finds no CUDA device on this host"),
        ("gpu", 1, "there is no device 'gpu'"),
        ("cuda:2", 2, "torch finds 2 CUDA devices on this host"),
    ],
)
def test_a_device_that_is_not_there_is_refused(request_: str, num_cards: int, said: str) -> None:
    with pytest.raises(InputError, match=said):
        choose_device(request_, local_rank=0, num_cards=num_cards)
