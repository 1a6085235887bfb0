"""The processes of one kind, workers or servers: started, watched, and ended in every state."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tatami.engine.calls import Calls
from tatami.engine.nodes import Nodes, choose_node
from tatami.engine.processes import Identity, is_running, kill, machine
from tatami.engine.silence import Listening, Sign

BOOT_TIMEOUT_S = 300.0
"""For one process to start, build the model and have the data; each has its own."""
_END_S = 2.0
"""Processes that do not end within it, as they hang, are killed."""
_ASK_S = 1.0
"""Between two looks at the nodes on which a process is being started."""
_PULSE_S = 1.0
"""Between signs of life, where the heartbeat does not ask for more: so well a report knows when a process failed."""

_Name = TypeVar("_Name", bound=Hashable)


@dataclass(kw_only=True)
class Member:
    """A process of the run.

    Attributes:
        seen_s: when it last gave a sign of life, since the start of the run.
        heard_s: the same on the clock that goes only while this process listens.
    """

    actor: Any
    seen_s: float
    heard_s: float
    node: str = ""
    identity: Identity | None = None

    @property
    def is_ready(self) -> bool:
        return self.identity is not None

    @property
    def pid(self) -> int:
        """0 while it starts."""
        return 0 if self.identity is None else self.identity.pid


@dataclass(frozen=True, kw_only=True)
class CrewTerms:
    """What all crews of a run have in common.

    Attributes:
        calls: where the signs of life are waited for.
        nodes: where members are started.
        now_s: seconds since the start of the run.
        listening: by which silence is counted.
        heartbeat_s: a member that is silent for longer is reported as late.
        pool: of processes that outlive runs.
    """

    calls: Calls
    nodes: Nodes
    now_s: Callable[[], float]
    listening: Listening
    heartbeat_s: float
    pool: Pool | None


class Crew(Generic[_Name]):
    """Keeps members by name, which may be a number.

    Args:
        on_up: called with a member that is ready.
        on_gone: called with a member that has died, or that is late: then it is still kept, until `kill`.
    """

    def __init__(
        self,
        process: type,
        terms: CrewTerms,
        *,
        on_up: Callable[[_Name, Member], None],
        on_gone: Callable[[_Name, Member, bool], None],
    ) -> None:
        self.members: dict[_Name, Member] = {}
        self._process, self._terms = process, terms
        self._on_up, self._on_gone = on_up, on_gone
        self._asked_s = 0.0

    def start(self, name: _Name, *, employ: Callable[[Any], Any], apart_from: Iterable[_Name] = ()) -> None:
        """Start a member, or take one that stands by; `employ` makes the call that tells it what it is for.

        Args:
            apart_from: names of members on whose nodes it should not be.
        """
        node = choose_node(
            self._terms.nodes.sound(),
            taken=[member.node for member in self.members.values()],
            apart_from=[self.members[other].node for other in apart_from if other in self.members],
        )
        actor = None if self._terms.pool is None else self._terms.pool.take(self._process.__name__, node=node)
        if actor is None:
            actor = _actor(self._process, node=node)
        member = Member(actor=actor, node=node or "", seen_s=self._terms.now_s(), heard_s=self._terms.listening.heard_s)
        self.members[name] = member
        self._terms.calls.add(employ(actor), done=partial(self._up, name, member), failed=partial(self._dead, name, member))

    def get(self, name: _Name) -> Any:
        """The actor; None where it is gone."""
        member = self.members.get(name)
        return None if member is None else member.actor

    def signs(self) -> dict[_Name, Sign]:
        """The last sign of life of each, and how long it may be silent: for its heartbeat, or until it is up."""
        return {
            name: Sign(heard_s=member.heard_s, limit_s=self._terms.heartbeat_s if member.is_ready else BOOT_TIMEOUT_S)
            for name, member in self.members.items()
        }

    def late(self, name: _Name) -> None:
        """A member has been silent for too long."""
        member = self.members[name]
        self._terms.nodes.note_death(member.node)
        self._on_gone(name, member, True)

    def look_for_lost_starts(self) -> None:
        """Report members that start on a node that is gone: Ray itself reports them late."""
        starting = [(name, member) for name, member in self.members.items() if not member.is_ready and member.node]
        if not starting or self._terms.now_s() - self._asked_s < _ASK_S:
            return
        self._asked_s = self._terms.now_s()
        alive = self._terms.nodes.alive()
        for name, member in starting:
            if member.node not in alive:
                self._dead(name, member, None)

    def restart_clocks(self) -> None:
        """The run begins now: no member has been silent before."""
        for member in self.members.values():
            self._heard(member)

    def kill(self, name: _Name) -> None:
        """End a member at once, wherever it is."""
        member = self.members.pop(name, None)
        if member is not None:
            _kill(member)

    def abandon(self) -> None:
        """End those on this machine, without Ray: there is none that could."""
        members, self.members = list(self.members.values()), {}
        for member in members:
            if member.identity is not None and member.identity.machine == machine():
                kill(member.pid)

    def end(self) -> None:
        """Keep for the next run who is free, and end the others."""
        members, self.members = list(self.members.values()), {}
        if self._terms.pool is not None:
            kind = self._process.__name__
            kept = [
                member
                for member in members
                if member.identity is not None
                and self._terms.pool.give(member.actor, kind=kind, node=member.identity.node if member.node else "")
            ]
            members = [member for member in members if member not in kept]
        for member in members:
            with suppress(RayActorError, ValueError):
                ray.kill(member.actor, no_restart=True)
        here = [member for member in members if member.identity is not None and member.identity.machine == machine()]
        limit_s = time.monotonic() + _END_S
        while any(is_running(member.pid) for member in here) and time.monotonic() < limit_s:
            time.sleep(0.01)
        for member in here:
            if is_running(member.pid):
                kill(member.pid)

    # -- signs of life --------------------------------------------------------------------------------------------

    def _up(self, name: _Name, member: Member, identity: Identity) -> None:
        if self.members.get(name) is not member:
            return
        member.identity, member.node = identity, identity.node
        self._heard(member)
        self._watch(name, member)
        self._on_up(name, member)

    def _watch(self, name: _Name, member: Member) -> None:
        """Keep one call pending: it fails within milliseconds of a death, and its delay shows that a process hangs."""
        pulse = member.actor.watch.options(concurrency_group="pulse").remote(min(_PULSE_S, self._terms.heartbeat_s / 4))
        self._terms.calls.add(pulse, done=partial(self._alive, name, member), failed=partial(self._dead, name, member))

    def _heard(self, member: Member) -> None:
        member.seen_s, member.heard_s = self._terms.now_s(), self._terms.listening.heard_s

    def _alive(self, name: _Name, member: Member, _: Any) -> None:
        self._heard(member)
        if self.members.get(name) is member:
            self._watch(name, member)

    def _dead(self, name: _Name, member: Member, _: Any) -> None:
        if self.members.get(name) is member:
            del self.members[name]
            self._terms.nodes.note_death(member.node)
            # "Unavailable" is what Ray says of a process on a node that it cannot reach; it must not come back.
            _kill(member)
            self._on_gone(name, member, False)


def _actor(process: type, *, node: str | None) -> Any:
    """On this node, or wherever Ray puts it; the pulse beats beside the work."""
    remote: Any = ray.remote
    kind = remote(num_cpus=0, concurrency_groups=getattr(process, "concurrency_groups", {"pulse": 1}))(process)
    if node is None:
        return kind.remote()
    # Not soft=True: Ray then starts it on another node as it likes, and the death of one takes all copies of a shard along.
    return kind.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()


def _kill(member: Member) -> None:
    """A stopped process hears nothing but SIGKILL, so Ray's own way comes second."""
    if member.identity is not None and member.identity.machine == machine():
        kill(member.identity.pid)
    elif member.identity is not None:
        # Sent and forgotten: where the whole node is gone, there is nothing left to be killed.
        there = NodeAffinitySchedulingStrategy(member.identity.node, soft=False)
        remote: Any = ray.remote
        remote(num_cpus=0, max_retries=0)(kill).options(scheduling_strategy=there).remote(member.pid)
    with suppress(RayActorError, ValueError):
        ray.kill(member.actor, no_restart=True)


_DISMISS_S = 5.0


class Pool:
    """Keeps the processes of runs that have ended; hand the same pool to the next `train`. Ends with Ray at the latest."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, str], list[Any]] = defaultdict(list)

    def take(self, kind: str, *, node: str | None) -> Any:
        """An idle process on this node, on any if None; None where there is none."""
        for (of_kind, on_node), actors in self._idle.items():
            if of_kind != kind or (node is not None and on_node != node):
                continue
            while actors:
                actor = actors.pop()
                with suppress(RayError):
                    ray.get(actor.dismiss.remote(), timeout=_DISMISS_S)  # it may have died meanwhile
                    return actor
        return None

    def give(self, actor: Any, *, kind: str, node: str) -> bool:
        """Keep a process, if it has nothing to do any more; whether it is kept."""
        try:
            ray.get(actor.dismiss.remote(), timeout=_DISMISS_S)
        except (RayError, GetTimeoutError):
            return False
        self._idle[kind, node].append(actor)
        return True

    def close(self) -> None:
        """End them all."""
        for actors in self._idle.values():
            for actor in actors:
                with suppress(RayError, ValueError):
                    ray.kill(actor, no_restart=True)
        self._idle.clear()
