"""Ranks that are added to an elastic run: a few start at a time, those that start are told, and there is a most."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("ray", reason="ray is not installed")

from tatami.elastic import runtime
from tatami.elastic.orders import Assignment
from tatami.elastic.settings import MOST_STARTING, ElasticContext, ElasticSettings
from tatami.errors import InputError


class FakeCrew:
    """Processes that start when the test says so."""

    def __init__(self, *_: object, **__: object) -> None:
        self.members: dict[str, object] = {}
        self.killed: list[str] = []

    def start(self, name: str, *, employ: Callable[[Any], Any]) -> None:
        told: list[Assignment] = []
        actor = SimpleNamespace(employ=SimpleNamespace(remote=lambda assignment, _: told.append(assignment)))
        employ(actor)
        assert [(each.name, each.members, each.joins) for each in told] == [(name, (name,), True)]
        self.members[name] = None

    def kill(self, name: str) -> None:
        del self.members[name]
        self.killed.append(name)


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch) -> runtime.ElasticRuntime:
    monkeypatch.setattr(runtime, "Crew", FakeCrew)
    assignment = Assignment(store=("", 0), token=b"", timeout_s=1.0, loopback=True, retile=False)
    watch = cast(Any, SimpleNamespace())
    return runtime.ElasticRuntime(
        ElasticSettings(ranks=2), context=ElasticContext(), assignment=assignment, spec=None, watch=watch
    )


def test_a_few_are_started_at_a_time_and_all_are_told_until_they_are_members(control: runtime.ElasticRuntime) -> None:
    crew = cast(Any, control)._ranks
    added = [control.add() for _ in range(6)]
    assert control.members == ("p0", "p1")
    assert [*control.starting] == added == ["p2", "p3", "p4", "p5", "p6", "p7"]
    assert crew.members.keys() == {"p2", "p3", "p4", "p5"}
    control._processors["p3"] = cast(Any, None)  # it has entered the loop, and waits to be let in
    control._start_waiting()
    assert crew.members.keys() == {"p2", "p3", "p4", "p5", "p6"}
    del crew.members["p4"]  # it has died
    control._start_waiting()
    assert crew.members.keys() == {"p2", "p3", "p5", "p6", "p7"}
    assert [*control.starting] == ["p2", "p3", "p5", "p6", "p7"]
    control.remove("p5")
    assert crew.killed == ["p5"]
    assert [*control.starting] == ["p2", "p3", "p6", "p7"]


def test_one_that_waits_for_its_start_is_never_started_where_it_is_removed(control: runtime.ElasticRuntime) -> None:
    crew = cast(Any, control)._ranks
    added = [control.add() for _ in range(5)]
    control.remove(added[4])
    control.remove(added[0])
    control._start_waiting()
    assert crew.members.keys() == set(added[1:4])
    assert [*control.starting] == added[1:4]


def test_a_program_that_adds_until_there_are_enough_members_is_stopped(control: runtime.ElasticRuntime) -> None:
    def keep_four() -> None:
        while len(control.members) < 4:
            control.add()

    with pytest.raises(InputError, match=rf"{MOST_STARTING} ranks are starting already \(p2 to p17\), which is the most"):
        keep_four()
    assert len(control.starting) == MOST_STARTING
    assert len(cast(Any, control)._ranks.members) == 4


def test_one_that_dies_while_it_sets_up_is_in_the_report(control: runtime.ElasticRuntime) -> None:
    died, silent, removed = (control.add() for _ in range(3))
    control.remove(removed)
    cast(Any, control)._processors[silent] = None  # it has come to the loop, and waits to be let in
    for name in (died, silent, removed):
        control._gone(name, cast(Any, None), name == silent)
    told = {died: "died before it joined the run", silent: "gave no sign of life before it joined the run"}
    assert control.report().not_joined == told
