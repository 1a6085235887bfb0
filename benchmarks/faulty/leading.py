"""The process that leads an elastic run, and sees to its faults:  python -m faulty.leading TRAINING.json RANKS ADDRESS"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from faulty.training import STEP, Training, train
from ray_nodes import await_nodes, await_port
from tatami.elastic import ElasticContext, ElasticControl, ElasticSettings, MemberChange, run_elastic
from tatami.engine.ray_engine import engine


class Faults:
    """Kills a rank every so often, from the first step on, and has a rank join for each that is gone.

    Args:
        every_s: from fault to fault; None: there are none.
        kill: ends the process of a member.
        now_s: a clock.

    Attributes:
        struck: faults so far.
    """

    def __init__(
        self, every_s: float | None, *, kill: Callable[[str], None], now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.struck = 0
        self._every_s = every_s
        self._kill = kill
        self._now_s = now_s
        self._control: ElasticControl | None = None
        self._next_s = float("inf")
        self._members: tuple[str, ...] = ()
        self._chance = random.Random(0)

    def start(self, control: ElasticControl) -> None:
        self._control, self._members = control, control.members

    def line(self, name: str, text: str) -> None:
        """A rank has printed a line, which it does after every step."""
        if text != STEP:
            print(f"{name}: {text}", flush=True)
            return
        assert self._every_s is not None
        now_s = self._now_s()
        self._next_s = min(self._next_s, now_s + self._every_s)
        if now_s >= self._next_s:
            self._next_s += self._every_s
            self.struck += 1
            self._kill(self._chance.choice(self._members))

    def changed(self, change: MemberChange) -> None:
        assert self._control is not None
        for _ in set(self._members) - set(change.members):
            self._control.add()
        self._members = change.members


def kill_rank(training: Training, member: str) -> None:
    """All hosts of a lab see the same processes."""
    with suppress(ProcessLookupError):  # it is gone, and the run is about to hear of it
        os.kill(int(training.pid_file(member).read_text()), signal.SIGKILL)


def lead(training: Training, *, ranks: int, address: str) -> None:
    """An elastic run on the nodes of Ray; its report is left in the folder."""
    await_port(address)
    faults = Faults(training.every_s, kill=partial(kill_rank, training))
    with engine(address=address) as ray:
        await_nodes(ray, len(training.speeds))
        result = run_elastic(
            partial(train, training),
            settings=ElasticSettings(ranks=ranks, patience_s=120.0, timeout_s=120.0),
            context=ElasticContext(address=address, on_start=faults.start, on_line=faults.line, on_change=faults.changed),
        )
    result.report.save(training.path / "report.json")
    (training.path / "struck").write_text(str(faults.struck))


if __name__ == "__main__":
    lead(Training.read(sys.argv[1]), ranks=int(sys.argv[2]), address=sys.argv[3])
