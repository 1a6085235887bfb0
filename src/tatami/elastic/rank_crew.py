"""The processes of an elastic run, by the names of its members: started, told what to do, listened to, and ended."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import ray

from tatami.comm.rendezvous import TOKEN_BYTES
from tatami.elastic.forming import keep_store
from tatami.elastic.orders import Assignment, HaltAnswer, Order, Report
from tatami.elastic.rank_process import RankProcess
from tatami.elastic.settings import ElasticContext, ElasticSettings
from tatami.engine.crew import Crew, Member
from tatami.engine.nodes import Nodes
from tatami.engine.ray_watch import RayWatch
from tatami.engine.run_loop import RunLoop
from tatami.errors import TrainingError

TICK_S = 0.02


class RankCrew:
    """Members are p0, p1, ... in the order in which they are started; a name is not used twice.

    Args:
        settings: of the run.
        context: of the run.
        watch: of Ray's own processes.
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
        watch: RayWatch,
        pickled_spec: bytes,
        now_s: Callable[[], float],
        on_report: Callable[[str, Report], None],
        on_gone: Callable[[str, bool], None],
    ) -> None:
        self._settings = settings
        self._spec = ray.put(pickled_spec)
        self._is_here = context.address is None
        self._host = "127.0.0.1" if self._is_here else _own_address()
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._store = keep_store(self._host, timeout_s=settings.timeout_s)
        self._on_report = on_report
        self._on_gone = on_gone
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []
        self._loop = RunLoop(clock=context.clock, watch=watch, tick_s=TICK_S)
        self._calls = self._loop.calls
        self._crew = Crew(
            RankProcess,
            calls=self._calls,
            nodes=Nodes(now_s=context.clock.now_s, shuns=False),
            now_s=now_s,
            listening=self._loop.listening,
            heartbeat_s=settings.heartbeat_s,
            pool=context.pool,
            on_up=self._up,
            on_gone=self._gone,
        )
        self._loop.crews.append(self._crew)

    @property
    def listened_s(self) -> float:
        """A clock that goes only while this process listens to the ranks."""
        return self._loop.listening.now_s

    @property
    def running(self) -> frozenset[str]:
        """Names of the ranks whose processes run or start."""
        return frozenset(self._names[number] for number in self._crew.members)

    def name(self) -> str:
        """A name for one more rank, which is not started yet."""
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
            token=self._token,
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
        """Hand on what the ranks have to tell, waiting a moment where there is nothing, and who is silent or lost.

        Raises:
            TrainingError: Ray's own processes do not work any more.
        """
        self._loop.step(is_over=is_over, stopped=lambda fault: TrainingError(f"the run stopped: {fault}"))

    def end(self) -> None:
        """End all processes, or keep them for the next run."""
        self._loop.end()

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
