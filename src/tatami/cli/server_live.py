"""What a parameter-server run looks like while it runs: a table on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from tatami.cli.terminal import is_terminal
from tatami.clock import Clock, SystemClock

if TYPE_CHECKING:
    from tatami.server import RunControl
    from tatami.server.report import RunStatus

_TABLE_S = 0.25
_LINE_S = 10.0


class RunDisplay:
    """Shows how a run stands; hand `on_round` to `tatami.server.train`, inside a `with` block."""

    def __init__(self, *, stream: TextIO | None = None, clock: Clock | None = None) -> None:
        self._run: RunControl | None = None
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock or SystemClock()
        self._live: Live | None = None
        self._every_s = _LINE_S
        self._shown_s = self._clock.now_s()

    def __enter__(self) -> RunDisplay:
        if is_terminal(self._stream):
            self._every_s = _TABLE_S
            self._live = Live(console=Console(file=self._stream), auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._run is not None:
            self._show(self._run)
        if self._live is not None:
            self._live.stop()

    def on_round(self, run: RunControl) -> None:
        """Called after every round; most are too soon after the one before to be shown."""
        self._run = run
        now_s = self._clock.now_s()
        if now_s - self._shown_s >= self._every_s:
            self._shown_s = now_s
            self._show(run)

    def _show(self, run: RunControl) -> None:
        status = run.status()
        if self._live is not None:
            self._live.update(run_table(status), refresh=True)
        else:
            line = " · ".join(f"{name} {value}" for name, value in _cells(status).items())
            print(line, file=self._stream, flush=True)


def run_table(status: RunStatus) -> Table:
    """One row of what matters."""
    table = Table(show_edge=False, pad_edge=False)
    for name in _cells(status):
        table.add_column(name, justify="right")
    cells: dict[str, Any] = _cells(status)
    table.add_row(*cells.values())
    return table


def _cells(status: RunStatus) -> dict[str, str]:
    return {
        "round": f"{status.round} of {status.rounds}",
        "commits/s": f"{status.commits_per_s:.3g}",
        "loss": "-" if status.loss is None else f"{status.loss:.4g}",
        "workers": str(status.workers),
        "spares": str(status.spares),
        "servers": str(status.servers),
        "deaths": str(status.deaths),
        "seconds lost": f"{status.lost_s:.1f}",
    }
