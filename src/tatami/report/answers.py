"""What another link or machine would bring: a table with a row for each question, and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from tatami.cluster import Cluster
from tatami.report.machines import display_names
from tatami.report.palette import GREY, MOSS
from tatami.report.tables import Table, table_of
from tatami.tiling import Plan, StagedPlan
from tatami.units import format_duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_NAMED = 4
_INCHES_PER_BAR = 0.35


class AnswerLike(Protocol):
    """What is shown of an answer (`tatami.planning.Answer`)."""

    @property
    def plan(self) -> Plan | StagedPlan | None: ...
    @property
    def speed_up(self) -> float | None: ...
    @property
    def takes_part(self) -> tuple[str, ...]: ...


def answer_table(words: Sequence[str], found: Sequence[AnswerLike], *, clusters: Sequence[Cluster]) -> Table:
    """A row for each question: the time of an iteration, samples a second against the first question, and who takes part."""
    rows = []
    usual = display_names(clusters[0])
    for question, answer, cluster in zip(words, found, clusters, strict=True):
        rows.append(
            {
                "what if": question,
                "iteration": "no room" if answer.plan is None else format_duration(answer.plan.predicted_s, digits=3),
                "speed-up": "-" if answer.speed_up is None else f"{answer.speed_up:.2f} x",
                "machines": _who(answer.takes_part, names={**display_names(cluster), **usual}, num_all=cluster.size),
            }
        )
    return table_of("Effect of each change:", rows, texts=("what if", "machines"), best=_best(found))


def _best(found: Sequence[AnswerLike]) -> int | None:
    gains = [answer.speed_up or 0.0 for answer in found]
    return gains.index(max(gains)) if len(gains) > 1 and max(gains) > 1 else None


def _who(used: Sequence[str], *, names: Mapping[str, str], num_all: int) -> str:
    if len(used) <= _MOST_NAMED:
        return ", ".join(names[name] for name in used)
    return f"all {len(used):,}" if len(used) == num_all else f"{len(used):,} of {num_all:,}"


def draw_answers(ax: Axes, words: Sequence[str], found: Sequence[AnswerLike]) -> Axes:
    """A bar for the samples a second of each question, against the first one."""
    gains = [answer.speed_up or 0.0 for answer in found]
    ax.figure.figure.set_size_inches(8.0, 1.2 + _INCHES_PER_BAR * len(gains))
    rows = range(len(gains))
    ax.barh(rows, gains, color=[GREY, *[MOSS] * (len(gains) - 1)])
    for row, (gain, answer) in enumerate(zip(gains, found, strict=True)):
        time = "no room" if answer.plan is None else format_duration(answer.plan.predicted_s, digits=3)
        ax.text(gain, row, f" {time}", va="center", fontsize=9)
    ax.set_yticks(rows, list(words))
    ax.invert_yaxis()
    ax.axvline(1.0, color=GREY, linewidth=1, linestyle="--")
    ax.set_xlim(0, 1.2 * max(1.0, *gains))
    ax.set_xlabel("samples a second, against the first (and seconds of an iteration)")
    return ax
