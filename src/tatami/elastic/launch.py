"""From what the user gives to an elastic run: Ray started or found, the function packed, the report kept."""

from __future__ import annotations

import runpy
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tatami.comm.rendezvous import TOKEN_BYTES
from tatami.elastic.settings import ElasticContext, ElasticSettings
from tatami.engine.ray_engine import by_value, engine, require_ray
from tatami.engine.ray_watch import RayWatch, ray_processes
from tatami.errors import InputError
from tatami.report.elastic_run import ElasticReport


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
    function: Callable[[], Any], *, settings: ElasticSettings, context: ElasticContext | None = None
) -> ElasticResult:
    """Run `function` on ranks that may die, leave and join; it trains with `tatami.steps`.

    Args:
        function: without arguments, run by every rank; it finds the ranks by `tatami.init()`. Sent to the processes as it is.
        settings: the numbers of the run.
        context: where it takes place, and who hears of it; None: on this machine.

    Raises:
        TrainingError: the run cannot go on: names what is lost, and with whom.
        InputError: the Ray cluster cannot be used.
        MissingExtraError: Ray is not installed.
    """
    context = context or ElasticContext()
    ray = require_ray()
    with engine(address=context.address):
        from tatami.elastic.forming import keep_store
        from tatami.elastic.orders import Assignment
        from tatami.elastic.rank_process import RankSpec
        from tatami.elastic.runtime import ElasticRuntime

        with by_value(function, context.hook):
            pickled_spec = ray.cloudpickle.dumps(RankSpec(function=function, hook=context.hook))
        host = "127.0.0.1" if context.address is None else str(ray.util.get_node_ip_address())
        store = keep_store(host, timeout_s=settings.timeout_s)
        assignment = Assignment(
            store=(host, store.port),
            token=secrets.token_bytes(TOKEN_BYTES),
            timeout_s=settings.timeout_s,
            loopback=context.address is None,
            retile=settings.retile,
        )
        with RayWatch(ray_processes(ray), clock=context.clock, tell=lambda text: print(text, file=sys.stderr)) as watch:
            spec = ray.put(pickled_spec)
            runtime = ElasticRuntime(settings, context=context, assignment=assignment, spec=spec, watch=watch)
            if context.on_start is not None:
                context.on_start(runtime)
            try:
                values = runtime.run()
            finally:
                if context.on_end is not None:
                    context.on_end(runtime.report())
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
