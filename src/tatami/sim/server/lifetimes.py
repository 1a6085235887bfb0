"""What breaks when: draws every machine's life, and strikes on the stage."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from tatami.sim.server.result import Period
from tatami.sim.server.server_setup import ServerSetup
from tatami.sim.stage import Going, Stage


@dataclass(slots=True, kw_only=True)
class _Life:
    """The life of the process that holds a place. `ends` is in seconds of computing, or a time, as `strikes` says."""

    process: int
    generation: int
    ends: float
    computed_s: float = 0.0
    began_s: float | None = None
    duration_s: float = 0.0
    striking: Going | None = None


class Fates:
    """The lives of workers, servers and links.

    Args:
        seed: None for nothing ever breaking.
        period: what undisturbed rounds take; None where lives count always, or never end.
        strike: called with a worker or a server that dies, as ("worker", number).
        cut, mend: called with the worker whose link breaks, or is back.
    """

    def __init__(
        self,
        setup: ServerSetup,
        stage: Stage,
        *,
        seed: int | None,
        period: Period | None,
        strike: Callable[[str, int], None],
        cut: Callable[[int], None],
        mend: Callable[[int], None],
    ) -> None:
        self._setup = setup
        self._stage = stage
        self._seed = seed
        self._strike = strike
        self._cut = cut
        self._mend = mend
        self._lives: dict[int, _Life] = {}
        self._generations: dict[tuple[str, int], int] = {}
        self._cut_off: set[int] = set()
        self._others: dict[tuple[str, int], Going] = {}
        self._dates: dict[tuple[str, int], float] = {}
        self._period = period
        self._has_ended = False
        if seed is not None:
            for index, (at_s, worker) in enumerate(setup.deaths):
                self._dates["death", index] = at_s
                self._others["death", index] = stage.at(at_s, partial(strike, "worker", worker))
            for server in range(len(setup.servers)):
                self.server_starts(server)
            if setup.link_mtbf_s is not None:
                for worker in range(len(setup.workers)):
                    self._link_breaks(worker)

    @property
    def disturbed(self) -> bool:
        """Whether something is broken."""
        return bool(self._cut_off)

    # -- workers --------------------------------------------------------------------------------------------------

    def takes(self, worker: int, process: int) -> None:
        """A process has this place from now on; it may have had it before."""
        setup, life = self._setup, self._lives.get(worker)
        if setup.mtbf_s is None or self._seed is None or (life is not None and life.process == process):
            return
        generation = 0 if life is None else life.generation + 1
        lasts_s = life_s(setup.mtbf_s, seed=self._seed, kind="worker", number=worker, generation=generation)
        if setup.strikes == "computing":
            assert self._period is not None
            # Example: a life of 100 s, where 60 s of each round of 75 s are computing. It ends after 80 s of computing, which
            # is after 100 s of the run: as many die as if the whole time counted, and all of them while they compute.
            ends = lasts_s * self._computing_s(worker) / self._period.round_s
        else:
            ends = lasts_s + self._stage.now_s
        life = _Life(process=process, generation=generation, ends=ends)
        self._lives[worker] = life
        if setup.strikes == "anytime":
            life.striking = self._stage.at(ends, lambda: self._strike("worker", worker))

    def computes(self, worker: int, duration_s: float) -> None:
        """A worker begins to compute for so long."""
        life = self._lives.get(worker)
        if life is None or self._setup.strikes != "computing":
            return
        life.began_s, life.duration_s = self._stage.now_s, duration_s
        if life.computed_s + duration_s >= life.ends:
            left_s = max(0.0, life.ends - life.computed_s)
            life.striking = self._stage.after(left_s, lambda: self._strike("worker", worker))

    def has_computed(self, worker: int) -> None:
        """It has computed all."""
        if (life := self._lives.get(worker)) is not None and life.began_s is not None:
            # Not what the clock says: sums of it would differ in the last digit from the same rounds passed over.
            life.computed_s += life.duration_s
            self._stop(life)

    def breaks_off(self, worker: int) -> None:
        """It computes no more: its work is void, or it is dead."""
        if (life := self._lives.get(worker)) is not None and life.began_s is not None:
            life.computed_s += self._stage.now_s - life.began_s
            self._stop(life)

    def _stop(self, life: _Life) -> None:
        life.began_s = None
        if life.striking is not None:
            self._stage.cancel(life.striking)
            life.striking = None

    # -- servers and links ----------------------------------------------------------------------------------------

    def server_starts(self, server: int) -> None:
        """A server is up from now on."""
        if self._setup.server_mtbf_s is not None:
            self._breaks("server", server, mtbf_s=self._setup.server_mtbf_s, what=lambda: self._strike("server", server))

    def _link_breaks(self, worker: int) -> None:
        def broken() -> None:
            self._cut_off.add(worker)
            self._stage.after(self._setup.link_repair_s, mended)
            self._cut(worker)

        def mended() -> None:
            self._cut_off.discard(worker)
            self._mend(worker)
            if not self._has_ended:
                self._link_breaks(worker)

        assert self._setup.link_mtbf_s is not None
        self._breaks("link", worker, mtbf_s=self._setup.link_mtbf_s, what=broken)

    def _breaks(self, kind: str, number: int, *, mtbf_s: float, what: Callable[[], None]) -> None:
        if self._seed is None:
            return
        generation = self._generations.get((kind, number), 0)
        self._generations[kind, number] = generation + 1
        at_s = self._stage.now_s + life_s(mtbf_s, seed=self._seed, kind=kind, number=number, generation=generation)
        self._dates[kind, number] = at_s
        self._others[kind, number] = self._stage.at(at_s, what)

    def hold_back(self, worker: int, goings: Iterable[Going]) -> None:
        """Transfers of a worker that is cut off stand still."""
        if worker in self._cut_off:
            for going in goings:
                self._stage.hold(going)

    def end(self) -> None:
        """Nothing breaks any more: the run is over."""
        self._has_ended = True
        for life in self._lives.values():
            if life.striking is not None:
                self._stage.cancel(life.striking)
        for going in self._others.values():
            self._stage.cancel(going)

    # -- rounds that nothing disturbs -----------------------------------------------------------------------------

    def undisturbed_rounds(self, period: Period, *, now_s: float, most: int) -> int:
        """Rounds that are over before anything breaks, all workers being at the beginning of one; at most `most`."""
        rounds = most
        dates = [at_s for at_s in self._dates.values() if at_s > now_s]
        if self._setup.strikes == "anytime":
            dates += [life.ends for life in self._lives.values()]
        else:
            for worker, life in self._lives.items():
                # The last of them must end before the life does; one that ends with it is struck.
                left = (life.ends - life.computed_s) / self._computing_s(worker)
                rounds = min(rounds, max(0, math.ceil(left) - 1))
        if dates:
            rounds = min(rounds, max(0, math.ceil((min(dates) - now_s) / period.round_s) - 1))
        return rounds

    def pass_rounds(self, rounds: int) -> None:
        """So many rounds go by."""
        for worker, life in self._lives.items():
            life.computed_s += rounds * self._computing_s(worker)

    def _computing_s(self, worker: int) -> float:
        return self._setup.task_flop / self._stage.speeds_flop_per_s[self._setup.workers[worker]]

    def renumber(self) -> None:
        """Each holder of a place is called by the place's number from now on."""
        for worker, life in self._lives.items():
            life.process = worker


_SCALE = 2.0**-53


def life_s(mtbf_s: float, *, seed: int, kind: str, number: int, generation: int) -> float:
    """Seconds until a machine breaks, exponentially distributed with mean `mtbf_s`.

    It is a function of its arguments: the same on every machine and in every order of asking, so that a run repeats to the last
    digit, and two recoveries compared with one seed see the same first failures.

    Args:
        kind: what it is, as "worker".
        generation: 0 for the first in this place, 1 for who replaced it, ...
    """
    name = f"{kind}/{number}/{generation}/{seed}".encode()
    word = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 11
    return -mtbf_s * math.log((word + 0.5) * _SCALE)
