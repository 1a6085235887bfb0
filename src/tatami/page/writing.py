"""The page itself: a template, charts, tables, and Vega, which draws in the browser; one file, which asks for nothing."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from tatami.errors import InputError, MissingExtraError
from tatami.outputs import check_output, write_text
from tatami.page.charts import charts_of
from tatami.page.facts import RunFacts, facts_of
from tatami.page.reading import RecordedRun
from tatami.units import format_size

LARGEST_PAGE_BYTES = 2_000_000
_SECTIONS = {
    "floor": ("The floor", "Who has which samples and units. Each rectangle is the tile of a rank."),
    "phases": ("Time of each rank", "Means of an iteration, while the tiling above was in force. Vertical and horizontal "
               "are communication, and contain the wait for other ranks."),
    "links": ("Bytes by link", "What an iteration sends from rank to rank with the tiling above, as planned."),
    "loss": ("Loss", "Dashed upright lines: the tiling changed."),
    "rate": ("Throughput", "As rank 0 saw it."),
    "speeds": ("Speeds of the ranks", "As estimated, relative to the fastest at that time. Triangles are alarms."),
    "accounts": ("What was lost, and what moving costs", "Since the change began, of the price. Tiles move before it is 1, or "
                 "at once where more was lost until the change was noticed."),
}  # fmt: skip


def check_page(path: Path | str, *, force: bool = False) -> None:
    """Check that a page can be written, before the work that it is for.

    Raises:
        OutputExistsError: `path` exists and `force` was not given.
        InputError: `path` is not an .html file, or cannot be written where it is.
        MissingExtraError: Vega is not installed.
    """
    if Path(path).suffix.lower() not in (".html", ".htm"):
        raise InputError(f"a report is written as .html, not as {Path(path).suffix or 'a file without an ending'!r}: {path}")
    if importlib.util.find_spec("vl_convert") is None:
        raise MissingExtraError("vl-convert-python, which holds Vega,", extra="report")
    check_output(path, force=force)


def write_page(run: RecordedRun, path: Path | str, *, title: str, force: bool = False) -> None:
    """Write the page of a run. Raises as `check_page` and `page_of`.

    Args:
        run: what was recorded.
        path: an .html file.
        title: of the page.
        force: overwrite an existing `path`.
    """
    check_page(path, force=force)
    write_text(path, page_of(run, title=title), force=force)


def page_of(run: RecordedRun, *, title: str) -> str:
    """The HTML text of the page, of less than `LARGEST_PAGE_BYTES`.

    Args:
        run: what was recorded.
        title: of the page.

    Raises:
        InputError: the page would be larger.
        MissingExtraError: Vega is not installed.
    """
    facts = facts_of(run)
    charts = charts_of(facts)
    absent = _absent(facts, charts)
    data = {"charts": charts, "steps": facts.steps, "native_bytes": facts.native_bytes}
    here = files("tatami.page")
    text = Template((here / "page.html").read_text(encoding="utf-8")).substitute(
        title=escape(title),
        style=(here / "page.css").read_text(encoding="utf-8"),
        summary=_summary(run, facts),
        notes="".join(f'<p class="note">{escape(note)}</p>' for note in facts.notes),
        slider=_slider(facts),
        charts="".join(_figure(name, charts) for name in _SECTIONS if name not in absent),
        absent=_told_absent(facts, absent),
        alarms=_alarms(facts),
        decisions=_decisions(facts),
        deaths=_deaths(facts),
        settings=_settings(run),
        data=_embedded(json.dumps(_plain(data), separators=(",", ":"), allow_nan=False)),
        vega=_embedded(_vega()),
        script=_embedded((here / "page.js").read_text(encoding="utf-8")),
    )
    size = len(text.encode())
    if size > LARGEST_PAGE_BYTES:
        most = format_size(LARGEST_PAGE_BYTES, digits=3)
        raise InputError(f"the report would have {format_size(size, digits=3)}, and {most} is the most; record less often")
    return text


@lru_cache(maxsize=1)
def _vega() -> str:
    """Vega, Vega-Lite and vega-embed as one script."""
    try:
        import vl_convert
    except ImportError as error:
        raise MissingExtraError("vl-convert-python, which holds Vega,", extra="report") from error
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")


def _embedded(text: str) -> str:
    """`text` as the content of a script element, which `</script` and `<!--` would end or change.

    Both stand in strings only, where `<` may as well be written `\\x3c`, or in JSON `\\u003c`.
    """
    return text.replace("</script", "\\u003c/script").replace("</SCRIPT", "\\u003c/SCRIPT").replace("<!--", "\\u003c!--")


def _plain(value: Any) -> Any:
    """`value` with null in place of NaN and infinities, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value


def _figure(name: str, charts: Mapping[str, Any]) -> str:
    title, caption = _SECTIONS[name]
    native = '<p id="native" class="note" hidden></p>' if name == "links" else ""
    if name not in charts:
        return f'<section><h2>{title}</h2><p class="none">No messages between two ranks are recorded.</p>{native}</section>'
    return (
        f'<section><h2>{title}</h2><figure><div id="{name}" class="chart" role="group" aria-label="{title}"></div>'
        f"<figcaption>{caption}</figcaption></figure>{native}</section>"
    )


def _absent(facts: RunFacts, charts: Mapping[str, Any]) -> list[str]:
    """Sections of which the records tell nothing; of links there may be sums that the libraries make by themselves."""
    told = {*charts, *(["links"] if any(facts.native_bytes) else [])}
    return [name for name in _SECTIONS if name not in told]


def _told_absent(facts: RunFacts, absent: Sequence[str]) -> str:
    """In one sentence; what was lost is known of runs that are watched only, and missed in no other."""
    titles = [_SECTIONS[name][0].lower() for name in absent if name != "accounts"]
    titles += [] if facts.num_checks else ["decisions"]
    return f'<p class="none">The records tell nothing of: {", ".join(titles)}.</p>' if titles else ""


def _slider(facts: RunFacts) -> str:
    if not facts.steps:
        return ""
    last = len(facts.steps) - 1
    disabled = " disabled" if last == 0 else ""
    return (
        f'<div class="slider"><label for="step">Tiling</label><input id="step" type="range" min="0" max="{last}" value="0" '
        f'step="1"{disabled}><output id="told" for="step" aria-live="polite"></output></div>'
    )


def _summary(run: RecordedRun, facts: RunFacts) -> str:
    losses = [row["loss"] for row in facts.losses if row["what"] == "training" and row["loss"] is not None]
    last = max((record["iteration"] for record in run.records if "iteration" in record), default=0)
    changed = sum(record["decision"] != "keep" for record in run.of("check")) or max(0, len(run.of("tiling")) - 1)
    numbers = {
        "ranks": str(len(facts.ranks)) if facts.ranks else "not recorded",
        "last iteration recorded": f"{last:,}",
        "loss": f"{losses[0]:.4g} to {losses[-1]:.4g}" if losses else "not recorded",
        "tiling changed": _times(changed),
        "deaths and other changes of the ranks": str(len(facts.deaths)) if facts.deaths else "none recorded",
    }
    return "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in numbers.items())


def _times(number: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(number, f"{number:,} times")


def _decisions(facts: RunFacts) -> str:
    if not facts.num_checks:
        return ""
    rows = [
        [f"{row['iteration']:,}", row["decision"], f"{row['imbalance']:.2f}", f"{row['moved_units']:,}", row["reason"]]
        for row in facts.decisions
    ]
    told = f"<p>The balance was looked at {_times(facts.num_checks)}; what changed something:</p>"
    head = ["after iteration", "decision", "slowest / fastest", "unit rows moved", "reason"]
    return f"<section><h2>Decisions</h2>{told}{_table(head, rows)}</section>"


def _alarms(facts: RunFacts) -> str:
    if not facts.alarms:
        return ""
    rows = [
        [f"{row['iteration']:,}", row["what"], f"{row['slower']:.2f} (+- {row['error']:.0%})", f"{row['began']:,}"]
        for row in facts.alarms
    ]
    return f"<section><h2>Alarms</h2>{_table(['after iteration', 'what', 'times as long', 'since iteration'], rows)}</section>"


def _deaths(facts: RunFacts) -> str:
    if not facts.deaths:
        return '<p class="none">The records tell of none.</p>'
    rows = [[row["when"], row["what"], row["repair"], row["lost"]] for row in facts.deaths]
    return _table(["when", "what happened", "repair", "time lost"], rows)


def _settings(run: RecordedRun) -> str:
    settings = {name: value for record in run.of("settings")[:1] for name, value in record.items() if name != "event"}
    if not settings:
        return ""
    rows = [[name, value if isinstance(value, str) else json.dumps(value)] for name, value in settings.items()]
    return f"<section><h2>Settings</h2>{_table(['setting', 'value'], rows)}</section>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that becomes a list of cards on a phone, where the heads are said in each cell."""
    if not rows:
        return '<p class="none">Nothing.</p>'
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(
        "<tr>"
        + "".join(f'<td data-head="{escape(name)}">{escape(cell)}</td>' for name, cell in zip(head, row, strict=True))
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
