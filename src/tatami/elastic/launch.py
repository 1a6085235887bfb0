"""From what the user gives to an elastic run: Ray started or found, the function packed, the report kept."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tatami.clock import SystemClock
from tatami.elastic.moments import Moment
from tatami.elastic.report import ElasticReport, MemberChange
from tatami.engine.by_value import by_value
from tatami.engine.ray_engine import engine, require_ray
from tatami.engine.ray_watch import RayWatch, ray_processes
from tatami.errors import InputError
from tatami.tiling import DEFAULT_PLANNER

if TYPE_CHECKING:
    from tatami.engine.pool import Pool


@dataclass(frozen=True, kw_only=True)
class ElasticResult:
    """The result of a run.

    Attributes:
        values: what the function returned, by the name of the member; of those that were there at the end.
        report: the changes of the members.
    """

    values: dict[str, Any]
    report: ElasticReport


def run_elastic(
    function: Callable[[], Any],
    *,
    ranks: int,
    copies: int = 2,
    planner: str = DEFAULT_PLANNER,
    address: str | None = None,
    heartbeat_s: float = 10.0,
    patience_s: float = 60.0,
    timeout_s: float = 60.0,
    on_change: Callable[[MemberChange], None] | None = None,
    on_line: Callable[[str, str], None] | None = None,
    on_start: Callable[[Any], None] | None = None,
    hook: Callable[[Moment, str, int], None] | None = None,
    pool: Pool | None = None,
) -> ElasticResult:
    """Run `function` on ranks that may die, leave and join; it trains with `tatami.steps`.

    Args:
        function: without arguments, run by every rank; it finds the ranks by `tatami.init()`. Sent to the processes as it is.
        ranks: to begin with, one process each.
        copies: holders that every unit has at least, so that the death of copies - 1 ranks at once loses nothing.
        planner: lays out the work after a change.
        address: of a Ray cluster; None starts Ray on this machine for the run.
        heartbeat_s: a rank that gives no sign of life for longer counts as dead. A rank that is stopped is noticed by this.
        patience_s: so long a rank may compute before it notices that others have gone; after that it counts as dead, too.
        timeout_s: so long an operation waits for another rank.
        on_change: told of every change of the members, in this process.
        on_line: given every line that a rank prints, with its name.
        on_start: given the `ElasticRuntime` before the ranks are started; its `add` and `remove` may be called in `on_change`.
        hook: see `tatami.elastic.moments`.
        pool: keeps the processes of runs that have ended for the next one.

    Raises:
        TrainingError: the run cannot go on: names what is lost, and with whom.
        InputError: invalid settings.
        MissingExtraError: Ray is not installed.
    """
    for name, value in (("heartbeat_s", heartbeat_s), ("patience_s", patience_s), ("timeout_s", timeout_s)):
        if not value > 0:
            raise InputError(f"{name} must be more than 0 seconds, not {value}")
    if ranks < 1:
        raise InputError(f"ranks must be at least 1, not {ranks}")
    if copies not in (1, 2):
        raise InputError(f"copies must be 1 or 2, not {copies}")
    ray = require_ray()
    with engine(address=address):
        from tatami.elastic.rank_process import RankSpec
        from tatami.elastic.runtime import ElasticRuntime, ElasticTerms

        terms = ElasticTerms(
            ranks=ranks,
            copies=copies,
            planner=planner,
            heartbeat_s=heartbeat_s,
            patience_s=patience_s,
            timeout_s=timeout_s,
            address=address,
        )
        with by_value(function, hook):
            pickled_spec = ray.cloudpickle.dumps(RankSpec(function=function, hook=hook))
        with RayWatch(ray_processes(ray), clock=SystemClock(), tell=lambda text: print(text, file=sys.stderr)) as watch:
            runtime = ElasticRuntime(
                terms,
                pickled_spec=pickled_spec,
                clock=SystemClock(),
                watch=watch,
                on_change=on_change,
                on_line=on_line,
                pool=pool,
            )
            if on_start is not None:
                on_start(runtime)
            values = runtime.run()
            return ElasticResult(values=dict(values), report=runtime.report())


class Script:
    """A script as a function: `python SCRIPT ARGUMENTS`, in a process that is there already."""

    def __init__(self, command: Sequence[str]) -> None:
        if not Path(command[0]).is_file():
            raise InputError(f"there is no script {command[0]!r}; an elastic run takes the path of a Python file")
        self._path = str(Path(command[0]).resolve())
        self._arguments = list(command[1:])

    def __call__(self) -> None:
        sys.argv = [self._path, *self._arguments]
        folder = str(Path(self._path).parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        runpy.run_path(self._path, run_name="__main__")
