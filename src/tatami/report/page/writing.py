"""The page itself: a template, charts, tables, and Vega, which draws in the browser; one file, which asks for nothing.

Names, reasons and settings come from records that may be a stranger's. They reach the page through `_text` (HTML) or `_data`
(JSON in a script element) only, and the page's policy lets the browser run the two scripts written here and no other.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from tatami.errors import InputError, MissingExtraError
from tatami.outputs import check_output, write_text
from tatami.report.page.charts import charts_of
from tatami.report.page.reading import RecordedRun
from tatami.report.page.run_facts import RunFacts, facts_of, thinned
from tatami.report.palette import PHASES
from tatami.units import format_size

LARGEST_PAGE_BYTES = 2_000_000
_MEMORY = ("memory_bytes", "memory_given_bytes")
_MOST_STAGE_RANKS = 100
_SECTIONS = {
    "floor": "Tiling",
    "timeline": "Timeline of one iteration",
    "phases": "Time of each rank by phase",
    "links": "Bytes by link",
    "loss": "Loss",
    "rate": "Throughput",
    "speeds": "Speeds of the ranks",
    "accounts": "Time lost, compared with the price of moving",
}


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
    absent, captions = _absent(facts, charts), _captions(facts)
    data = {"charts": charts, "steps": facts.steps, "native_bytes": facts.native_bytes}
    here = files("tatami.report.page")
    vega, script = _script(_vega()), _script((here / "page.js").read_text(encoding="utf-8"))
    text = Template((here / "page.html").read_text(encoding="utf-8")).substitute(
        title=_text(title),
        script_hashes=f"{_script_hash(vega)} {_script_hash(script)}",
        style=(here / "page.css").read_text(encoding="utf-8"),
        summary=_summary(run, facts),
        notes="".join(f'<p class="note">{_text(note)}</p>' for note in facts.notes),
        slider=_slider(facts),
        charts="".join(_figure(name, charts, captions[name]) for name in _SECTIONS if name not in absent),
        stages=_stages(facts),
        absent=_told_absent(facts, absent),
        alarms=_alarms(facts),
        decisions=_decisions(facts),
        deaths=_deaths(facts),
        settings=_settings(run),
        data=_data(data),
        vega=vega,
        script=script,
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


def _text(value: object) -> str:
    """`value` as text of an element or an attribute of the page."""
    return escape(str(value).encode("utf-8", errors="replace").decode())


def _data(value: Any) -> str:
    """`value` as JSON in a script element, with every character that could end it written as `\\uXXXX`.

    `json.dumps` writes U+2028, U+2029 and all else that is not ASCII in this way by itself.
    """
    text = json.dumps(_plain(value), separators=(",", ":"), allow_nan=False)
    return re.sub("[<>&]", lambda found: f"\\u{ord(found[0]):04x}", text)


def _script(text: str) -> str:
    """A script of ours as the content of a script element; what would end it stands in strings only."""
    return re.sub("<(?=/script|script|!--)", r"\\x3c", text, flags=re.IGNORECASE)


def _script_hash(text: str) -> str:
    """The name by which a Content-Security-Policy allows this script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _plain(value: Any) -> Any:
    """`value` with null in place of NaN and infinities, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value


def _captions(facts: RunFacts) -> dict[str, str]:
    """What is said below each chart: of what it shows of this run, nothing else."""
    changes = "Dotted vertical lines: the tiling changed. " if len(facts.steps) > 1 else ""
    waits = "Sums include the wait for other ranks. " if facts.phases else ""
    parts = "stages" if any(step["stages"] for step in facts.steps) else "units"
    alarms = "Triangles: alarms. " if facts.alarms else ""
    return {
        "floor": f"The samples and {parts} of each rank.",
        "timeline": f"Numbers: micro-batches. Time 0: a barrier of all ranks. {_stage_waits(facts.timeline)}",
        "phases": f"Means over the iterations with {'the tiling above' if facts.steps else 'all tilings'}. {waits}"
        f"{_stage_waits(facts.phases)}",
        "links": "What an iteration sends from rank to rank with the tiling above, as planned.",
        "loss": changes,
        "rate": f"As measured by rank 0. {changes}",
        "speeds": f"As estimated, relative to the fastest rank at that time. {alarms}{changes if facts.alarms else ''}",
        "accounts": "Time lost since a change, as a fraction of what moving would cost. Work moves before it reaches 1 "
        f"(dashed), or at once where more was lost before the change was noticed. {changes}",
    }


def _stage_waits(rows: Sequence[Mapping[str, Any]]) -> str:
    """What those waits are for other stages that rows have."""
    words = {"handover": "waiting for a tensor on its way", "bubble": "waiting for another stage to send"}
    shown = [f"{PHASES[phase][0]}: {words[phase]}" for phase in words if any(row["phase"] == phase for row in rows)]
    told = "; ".join(shown)
    return f"{told[0].upper()}{told[1:]}. " if told else ""


def _figure(name: str, charts: Mapping[str, Any], caption: str) -> str:
    title = _SECTIONS[name]
    native = '<p id="native" class="note" hidden></p>' if name == "links" else ""
    if name not in charts:
        return f'<section><h2>{title}</h2><p class="none">No messages between two ranks are recorded.</p>{native}</section>'
    told = f"<figcaption>{caption.strip()}</figcaption>" if caption else ""
    return (
        f'<section><h2>{title}</h2><figure><div id="{name}" class="chart" role="group" aria-label="{title}"></div>'
        f"{told}</figure>{native}</section>"
    )


def _absent(facts: RunFacts, charts: Mapping[str, Any]) -> list[str]:
    """Sections without records; of links there may be sums that the libraries make by themselves."""
    told = {*charts, *(["links"] if any(facts.native_bytes) else [])}
    return [name for name in _SECTIONS if name not in told]


def _told_absent(facts: RunFacts, absent: Sequence[str]) -> str:
    """One sentence that names them; what only runs that are watched, or that have stages, record is not missed in others."""
    titles = [_SECTIONS[name].lower() for name in absent if name not in ("accounts", "timeline")]
    titles += [] if facts.num_checks else ["decisions"]
    return f'<p class="none">Not recorded: {", ".join(titles)}.</p>' if titles else ""


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
    values = [row["loss"] for row in facts.losses if row["what"] == "training"]
    losses = ["nan" if value is None else f"{value:.4g}" for value in values]
    last = max((record["iteration"] for record in run.records if "iteration" in record), default=0)
    changed = sum(record["decision"] != "keep" for record in run.of("check")) or max(0, len(run.tilings) - 1)
    numbers = {
        "ranks": str(len(facts.ranks)) if facts.ranks else "not recorded",
        **({"pipeline stages": str(facts.steps[-1]["stages"])} if facts.steps and facts.steps[-1]["stages"] else {}),
        "last iteration recorded": f"{last:,}",
        "loss": f"{losses[0]} to {losses[-1]}" if losses else "not recorded",
        "tiling changes": _times(changed),
        "deaths and other changes of the ranks": str(len(facts.deaths)) if facts.deaths else "none recorded",
    }
    return "".join(f"<div><dt>{name}</dt><dd>{_text(value)}</dd></div>" for name, value in numbers.items())


def _times(number: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(number, f"{number:,} times")


def _decisions(facts: RunFacts) -> str:
    if not facts.num_checks:
        return ""
    rows = [
        [f"{row['iteration']:,}", row["decision"], f"{row['imbalance']:.2f}", f"{row['moved_units']:,}", row["reason"]]
        for row in facts.decisions
    ]
    told = f"<p>The balance was checked {_times(facts.num_checks)}. Decisions that changed the tiling:</p>"
    head = ["after iteration", "decision", "slowest / fastest", "unit rows moved", "reason"]
    return f"<section><h2>Decisions</h2>{told}{_table(head, rows)}</section>"


def _stages(facts: RunFacts) -> str:
    """Who computes what, and what crosses, with the last tiling."""
    if facts.stages is None:
        return ""
    rows = [
        [
            f"{each['stage']}",
            f"{each['replica']}",
            each["rank"],
            each["pieces"],
            f"{each['samples']:,} in {each['micro_batches']:,}",
            f"{each['in_flight']:,}",
            " of ".join(format_size(round(size), digits=3) for size in map(each.get, _MEMORY) if size is not None),
        ]
        for each in thinned(facts.stages["ranks"], _MOST_STAGE_RANKS)
    ]
    head = ["stage", "replica", "rank", "pieces", "samples in micro-batches", "in flight", "memory, planned"]
    return f"<section><h2>Pipeline stages</h2>{_table(head, rows)}<p>{_text(' '.join(facts.stages['sentences']))}</p></section>"


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
        return '<p class="none">None is recorded.</p>'
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
    heads = "".join(f'<th scope="col">{_text(name)}</th>' for name in head)
    body = "".join(
        "<tr>"
        + "".join(f'<td data-head="{_text(name)}">{_text(cell)}</td>' for name, cell in zip(head, row, strict=True))
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
