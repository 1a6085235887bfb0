"""The processes of an elastic run, by the names of its members: started, told what to do, listened to, and ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray

from tatami.elastic.orders import Assignment, HaltAnswer, Order, Report
from tatami.elastic.rank_process import RankProcess
from tatami.elastic.settings import ElasticContext, ElasticSettings
from tatami.elastic.store import keep_store
from tatami.engine.calls import Calls
from tatami.engine.crew import Crew, Member
from tatami.engine.nodes import Nodes
from tatami.engine.silence import Listening, look

TICK_S = 0.02


class RankCrew:
    """Members are p0, p1, ... in the order in which they are started; a name is not used twice.

    Args:
        settings: of the run.
        context: of the run.
        pickled_spec: what every rank runs; see `RankSpec`.
        now_s: seconds since the start of the run.
        on_report: given the name of a rank, and what it reports.
        on_gone: given the name of a rank whose process is gone, or is silent: then it still runs, until `kill`.
    """

    def __init__(
        self,
        settings: ElasticSettings,
        *,
        context: ElasticContext,
        pickled_spec: bytes,
        now_s: Callable[[], float],
        on_report: Callable[[str, Report], None],
        on_gone: Callable[[str, bool], None],
    ) -> None:
        self._settings = settings
        self._clock = context.clock
        self._spec = ray.put(pickled_spec)
        self._is_here = context.address is None
        self._host = "127.0.0.1" if self._is_here else _own_address()
        self._store = keep_store(self._host, timeout_s=settings.timeout_s)
        self._on_report = on_report
        self._on_gone = on_gone
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []
        self._calls = Calls()
        self._listening = Listening(self._clock.now_s(), longest_step_s=5 * TICK_S)
        self._crew = Crew(
            RankProcess,
            calls=self._calls,
            nodes=Nodes(now_s=self._clock.now_s, shuns=False),
            now_s=now_s,
            listening=self._listening,
            heartbeat_s=settings.heartbeat_s,
            pool=context.pool,
            on_up=self._up,
            on_gone=self._gone,
        )

    @property
    def listened_s(self) -> float:
        """A clock that goes only while this process listens to the ranks."""
        return self._listening.now_s

    @property
    def running(self) -> frozenset[str]:
        """Those whose processes run, or start."""
        return frozenset(self._names[number] for number in self._crew.members)

    def name(self) -> str:
        """Of one more rank, which is not started yet."""
        name = f"p{len(self._names)}"
        self._numbers[name] = len(self._names)
        self._names.append(name)
        return name

    def start(self, name: str, *, members: tuple[str, ...], joins: bool) -> None:
        """Start the process of a rank, among these members at first."""
        assignment = Assignment(
            name=name,
            group=0,
            members=members,
            joins=joins,
            store=(self._host, self._store.port),
            timeout_s=self._settings.timeout_s,
            loopback=self._is_here,
            retile=self._settings.retile,
        )
        self._crew.start(self._numbers[name], employ=lambda actor: actor.employ.remote(assignment, self._spec))

    def halt(self, name: str, *, ticket: int, abort: bool, done: Callable[[HaltAnswer], None]) -> bool:
        """See `OrderBox.halt`; `done` is given the answer. False where the process is gone, of which its watch tells."""
        actor = self._crew.get(self._numbers[name])
        if actor is None:
            return False
        call = actor.halt.options(concurrency_group="halts").remote(ticket, abort)
        self._calls.add(call, done=lambda answer: None if answer is None else done(answer))
        return True

    def order(self, name: str, order: Order, *, ticket: int) -> None:
        """See `OrderBox.hand_in`."""
        actor = self._crew.get(self._numbers[name])
        if actor is not None:
            self._calls.add(actor.obey.remote(order, ticket), done=lambda _: None)

    def kill(self, name: str) -> None:
        """End its process at once."""
        self._crew.kill(self._numbers[name])

    def listen(self, *, is_over: Callable[[], bool]) -> None:
        """Hand on what the ranks have to tell, waiting a moment where there is nothing, and who is silent or lost."""

        def read(timeout_s: float = 0.0) -> bool:
            self._calls.wait(timeout_s=timeout_s, is_over=is_over)
            return not is_over()

        if read(TICK_S):
            self._listening.advance(self._clock.now_s())
            look([self._crew], now_s=self._listening.now_s, read=read)
        if not is_over():
            self._crew.look_for_lost_starts()

    def end(self, *, without_ray: bool) -> None:
        """End all processes, or keep them for the next run."""
        self._calls.clear()
        if without_ray:
            self._crew.abandon()
        else:
            self._crew.end()

    def _up(self, number: int, member: Member) -> None:
        def collect() -> None:
            call = member.actor.collect.options(concurrency_group="mail").remote()
            self._calls.add(call, done=take)

        def take(reports: list[Report]) -> None:
            if self._crew.members.get(number) is member:
                collect()
                for report in reports:
                    self._on_report(self._names[number], report)

        collect()

    def _gone(self, number: int, member: Member, late: bool) -> None:
        del member
        self._on_gone(self._names[number], late)


def _own_address() -> str:
    get_node_ip_address: Any = ray.util.get_node_ip_address  # without types
    return str(get_node_ip_address())
