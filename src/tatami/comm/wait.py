"""The one way to wait for another rank: spin briefly, then sleep in growing steps, and never forever.

Where every rank has a core of its own, polling answers in microseconds (2 ranks: a barrier in 2 us) and costs no other rank
anything: a wait polls for `spin_s`, yielding the core between polls. Where ranks outnumber cores, a rank that polls keeps its
peer from running, and beside other people's jobs it loses its own turn with each yield: 8 ranks on 2 busy cores meet in 5 to
10 ms when they spin, in 0.8 ms when they sleep at once. Sleeps grow with the time waited, so that they add only a few per cent
to it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tatami.clock import Clock
from tatami.comm.stall_report import AbstractRollCall, format_ranks
from tatami.errors import CommTimeoutError, InputError

WAIT_VARIABLE = "TATAMI_WAIT"
WAIT_CHOICES = ("auto", "spin", "sleep")

FIRST_SLEEP_S = 20e-6
LONGEST_SLEEP_S = 500e-6
SLEEP_FRACTION = 0.03
ROOMY_SPIN_S = 2e-3
"""Where every rank has its own core: covers the transfer of a few MiB, in which the polls themselves move the data."""
ANSWER_EVERY_S = 0.05
"""How often a rank that waits looks whether another one asks what it does."""


@dataclass(frozen=True, kw_only=True)
class WaitPolicy:
    """Poll for `spin_s`; then sleep `sleep_fraction` of the time waited so far, within the two bounds.

    Attributes:
        roll_call: of these ranks; in long waits it answers those who ask what this rank does, and brings what others tell.
        lineage: of the communicator that is waited on.
        members: its ranks, as ranks of the job; None: all.
    """

    spin_s: float
    first_sleep_s: float = FIRST_SLEEP_S
    longest_sleep_s: float = LONGEST_SLEEP_S
    sleep_fraction: float = SLEEP_FRACTION
    roll_call: AbstractRollCall | None = None
    lineage: str = ""
    members: tuple[int, ...] | None = None


def wait_policy(*, ranks_on_host: int, cores: int, environ: Mapping[str, str] | None = None) -> WaitPolicy:
    """The policy asked for by `TATAMI_WAIT`; `auto`, the default, spins only where every rank has its own core.

    Raises:
        InputError: `TATAMI_WAIT` is none of the choices.
    """
    choice = (os.environ if environ is None else environ).get(WAIT_VARIABLE, "auto")
    if choice not in WAIT_CHOICES:
        raise InputError(f"{WAIT_VARIABLE}={choice!r} is not a way to wait; choose one of: {', '.join(WAIT_CHOICES)}")
    if choice == "spin":
        return WaitPolicy(spin_s=float("inf"))
    if choice == "sleep":
        return WaitPolicy(spin_s=0.0)
    return WaitPolicy(spin_s=ROOMY_SPIN_S if ranks_on_host <= cores else 0.0)


def wait_until(
    done: Callable[[], bool],
    *,
    policy: WaitPolicy,
    timeout_s: float,
    clock: Clock,
    doing: Callable[[], str] = lambda: "an operation that is not named here",
    peer: int | None = None,
) -> float | None:
    """Poll `done` until it is true.

    Args:
        done: whether it is over; asked again and again.
        doing: what this wait is, for others who ask.
        peer: the rank that it is for; None: all of the communicator.

    Returns:
        None once it is true; the seconds waited where `timeout_s` passed first.

    Raises:
        TatamiError: what another rank has failed with, see `tatami.comm.refusals`.
    """
    if done():
        return None
    start_s = clock.now_s()
    answer_after_s = ANSWER_EVERY_S
    while not done():
        waited_s = clock.now_s() - start_s
        if waited_s >= timeout_s:
            return waited_s
        if waited_s > answer_after_s:
            answer_after_s = waited_s + ANSWER_EVERY_S
            if policy.roll_call is not None:
                policy.roll_call.answer(doing())
                if not done():
                    needs = policy.members if peer is None else (peer if policy.members is None else policy.members[peer],)
                    policy.roll_call.refusals.check(policy.lineage, needs, now_s=clock.now_s())
        if waited_s < policy.spin_s:
            os.sched_yield()
        else:
            sleep_s = max(policy.first_sleep_s, min(waited_s * policy.sleep_fraction, policy.longest_sleep_s))
            clock.sleep(min(sleep_s, timeout_s - waited_s))
    return None


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """What a rank waits for: `peer` and `tag` for a message, `missing` for a collective where it is known who has not come."""

    operation: str
    rank: int
    size: int
    peer: int | None = None
    tag: int | None = None
    missing: tuple[int, ...] = ()

    @property
    def what(self) -> str:
        """The operation: `recv from rank 5 (tag 7)`."""
        direction = "to" if self.operation == "send" else "from"
        peer = f" {direction} rank {self.peer}" if self.peer is not None else ""
        tag = f" (tag {self.tag})" if self.tag is not None else ""
        return f"{self.operation}{peer}{tag}"

    def describe(self) -> str:
        """The operation and its place: `recv from rank 5 (tag 7) on rank 2 of 8`."""
        return f"{self.what} on rank {self.rank} of {self.size}"

    def timeout(
        self, waited_s: float, *, roll_call: AbstractRollCall | None = None, members: tuple[int, ...] | None = None
    ) -> CommTimeoutError:
        """The error of a wait that ended after `waited_s` seconds without its message; others are asked what they do.

        Args:
            waited_s: for how long.
            roll_call: of all ranks of the job.
            members: the communicator's ranks, as ranks of the job; None: all.
        """
        if self.peer is None:
            who = f"{format_ranks(self.missing)} did not join" if self.missing else "not every rank joined in or went on"
            question = "Do all ranks call the same collectives in the same order, and are they alive?"
        else:
            who = f"rank {self.peer} did not take it" if self.operation == "send" else f"nothing came from rank {self.peer}"
            question = f"Is rank {self.peer} alive, and does it use the same tag?"
        findings = "" if roll_call is None else roll_call.findings(self.describe(), size=self.size, waited_s=waited_s)
        return CommTimeoutError(
            f"{self.describe()} timed out after {waited_s:.3g} s: {who}. {self._in_the_job(members)}{findings or question} "
            "Raise timeout_s if it is only slow or the link is."
        )

    def _in_the_job(self, members: tuple[int, ...] | None) -> str:
        """Which ranks of the job those are that the error names by their numbers in a part of it, such as a replica."""
        named = sorted({self.rank, *self.missing, *(() if self.peer is None else (self.peer,))})
        if members is None or all(members[rank] == rank for rank in named):
            return ""
        here, there = format_ranks(named), format_ranks([members[rank] for rank in named])
        return f"In the whole job {here} {'is' if len(named) == 1 else 'are'} {there}. "


def wait_for(
    done: Callable[[], bool], waiting: Callable[[], Waiting], *, policy: WaitPolicy, timeout_s: float, clock: Clock
) -> None:
    """As `wait_until`, for what `waiting` describes, which may be known better as time passes.

    Raises:
        CommTimeoutError: `timeout_s` passed first; names who did not come.
        TatamiError: what another rank has failed with.
    """
    if done():
        return
    doing, peer = (lambda: waiting().describe()), waiting().peer
    waited_s = wait_until(done, policy=policy, timeout_s=timeout_s, clock=clock, doing=doing, peer=peer)
    if waited_s is not None:
        raise waiting().timeout(waited_s, roll_call=policy.roll_call, members=policy.members)
