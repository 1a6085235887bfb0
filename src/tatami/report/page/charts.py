"""The charts of the page, as specifications of Vega-Lite. Ranks and phases have colours of their own; all else has the text's.

Charts of one tiling have a parameter `step`, which the slider of the page sets.
"""

from __future__ import annotations

from typing import Any

from tatami.report.page.run_facts import RunFacts
from tatami.report.palette import PHASES, RANKS, ink_on

Spec = dict[str, Any]
_STEP = [{"name": "step", "value": 0}]
_OF_STEP = {"filter": "datum.step == step"}
_INK = "currentColor"
_LOSSES = {"training": [1, 0], "validation": [4, 3]}
"""Dashes of the curve."""
_RANKS_NAMED = 12
"""A legend or a number in a cell is left out where there are more ranks: the labels of tiles and axes tell."""


def charts_of(facts: RunFacts) -> dict[str, Spec]:
    """The specification of each chart for which there is anything, by the name of its section."""
    charts = {}
    if facts.tiles:
        charts["floor"] = _floor(facts)
    if facts.timeline:
        charts["timeline"] = _timeline(facts)
    if facts.phases:
        charts["phases"] = _phases(facts)
    if any(row["loss"] is not None for row in facts.losses):
        charts["loss"] = _loss(facts)
    if facts.rates:
        charts["rate"] = _rate(facts)
    if facts.speeds:
        charts["speeds"] = _speeds(facts)
    if facts.accounts:
        charts["accounts"] = _accounts(facts)
    if facts.links:
        charts["links"] = _links(facts)
    return charts


def _chart(rows: list[dict[str, Any]], *, height: int, **more: Any) -> Spec:
    return {"width": "container", "height": height, "data": {"values": rows}, **more}


def _rank_color(facts: RunFacts, *, legend: bool = True) -> Spec:
    shown = {"orient": "bottom", "columns": 4, "title": None} if legend and len(facts.ranks) <= _RANKS_NAMED else None
    return {"field": "rank", "type": "nominal", "scale": {"domain": facts.ranks, "range": list(RANKS)}, "legend": shown}


def _axis(name: str, title: str, **more: Any) -> Spec:
    return {"field": name, "type": "quantitative", "title": title, **more}


def _shown(rows: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """The words and the colours of those phases in which rows spend time."""
    shown = [PHASES[phase] for phase in PHASES if any(row["phase"] == phase and row.get("ms") != 0 for row in rows)]
    return [word for word, _ in shown], [colour for _, colour in shown]


def _in_words(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With the standard word of each phase; what is no phase keeps the name that the record has."""
    return [{**row, "phase": PHASES.get(row["phase"], (row["phase"],))[0]} for row in rows]


def _phase_color(words: list[str], colours: list[str]) -> Spec:
    scale = {"domain": words, "range": colours}
    return {"field": "phase", "type": "nominal", "title": None, "scale": scale, "legend": {"orient": "bottom", "columns": 2}}


_ITERATION = _axis("iteration", "iteration", axis={"tickCount": 6, "format": ",d"})


def _nominal(name: str, title: str | None, **more: Any) -> Spec:
    return {"field": name, "type": "nominal", "title": title, **more}


def _lines(y: Spec, *, mark: Spec, **encoding: Spec) -> Spec:
    """Over iterations."""
    return {
        "mark": {"type": "line", "strokeWidth": 2, "tooltip": True, **mark},
        "encoding": {"x": _ITERATION, "y": y, **encoding},
    }


def _floor(facts: RunFacts) -> Spec:
    samples, units = max(step["samples"] for step in facts.steps), max(step["units"] for step in facts.steps)
    x = _axis("x1", "samples", scale={"domain": [0, samples], "nice": False}, axis={"grid": False, "tickCount": 5})
    stages = max(step["stages"] for step in facts.steps)
    ticks: Spec = {"grid": False, "tickCount": 5}
    if stages:
        ticks |= {"values": [number + 0.5 for number in range(stages)], "labelExpr": "datum.value + 0.5"}
    title = "stage" if stages else "units"
    y = _axis("y1", title, scale={"domain": [0, units], "nice": False, "reverse": True}, axis=ticks)
    tooltip = [{"field": name, "title": name} for name in ("rank", "samples", title)]
    fits = (
        f"(datum.x2 - datum.x1) / {samples} * width > 9 * length(datum.rank) && (datum.y2 - datum.y1) / {units} * height > 12"
    )
    tiles = {
        "mark": {"type": "rect", "stroke": "black", "strokeWidth": 0.7},
        "encoding": {
            "x": x,
            "x2": {"field": "x2"},
            "y": y,
            "y2": {"field": "y2"},
            "color": _rank_color(facts, legend=False),
            "tooltip": tooltip,
        },
    }
    labels = {
        "transform": [{"filter": fits}],
        "mark": {"type": "text", "fontSize": 13, "aria": False},
        "encoding": {
            "x": {**x, "field": "x"},
            "y": {**y, "field": "y"},
            "text": {"field": "rank"},
            "color": {**_rank_color(facts, legend=False), "scale": {"domain": facts.ranks, "range": [*map(ink_on, RANKS)]}},
        },
    }
    derive = [
        _OF_STEP,
        {"calculate": "(datum.x1 + datum.x2) / 2", "as": "x"},
        {"calculate": "(datum.y1 + datum.y2) / 2", "as": "y"},
        {"calculate": "datum.x1 + ' to ' + datum.x2", "as": "samples"},
        {"calculate": "floor(datum.y1) + 1" if stages else "datum.y1 + ' to ' + datum.y2", "as": title},
    ]
    return _chart(
        facts.tiles,
        height=320,
        params=_STEP,
        transform=derive,
        layer=[tiles, labels],
        resolve={"scale": {"color": "independent"}},
    )


def _timeline(facts: RunFacts) -> Spec:
    """What each rank did when; the micro-batch stands in what was computed for it."""
    place_of = {each["rank"]: (each["stage"], each["replica"]) for each in (facts.stages or {}).get("ranks", ())}
    told = {row["rank"] for row in facts.timeline}
    ranks = sorted(told, key=lambda rank: place_of.get(rank, (len(told) + 1, 0)))
    label = {rank: f"{rank}, stage {place_of[rank][0]}" if rank in place_of else rank for rank in ranks}
    rows = [{**row, "rank": label[row["rank"]]} for row in _in_words(facts.timeline)]
    row_px = max(6, min(34, 1600 // len(ranks)))
    most = max(row["ended"] for row in rows)
    x = _axis("began", "milliseconds", scale={"domain": [0, most], "nice": False}, axis={"tickCount": 6, "grid": False})
    y = _nominal("rank", None, scale={"domain": [label[rank] for rank in ranks], "paddingInner": 0.15})
    words, colours = _shown(facts.timeline)
    tooltip = [{"field": "rank"}, {"field": "phase"}, {"field": "number", "title": "micro-batch"}]
    tooltip += [{"field": "ms", "type": "quantitative", "format": ".3~f"}]
    bars = {
        "mark": {"type": "bar"},
        "encoding": {"x": x, "x2": {"field": "ended"}, "y": y, "color": _phase_color(words, colours), "tooltip": tooltip},
    }
    fits = f"(datum.phase == 'forward' || datum.phase == 'backward') && datum.ms / {most} * width > 14"
    numbers = {
        "transform": [{"filter": fits}, {"calculate": "(datum.began + datum.ended) / 2", "as": "middle"}],
        "mark": {"type": "text", "fontSize": 11, "color": "black", "aria": False},
        "encoding": {"x": {**x, "field": "middle"}, "y": y, "text": {"field": "number"}},
    }
    derive = [_OF_STEP, {"calculate": "datum.ended - datum.began", "as": "ms"}]
    layer = [bars, numbers] if row_px >= 14 else [bars]
    return _chart(rows, height=row_px * len(ranks), params=_STEP, transform=derive, layer=layer)


def _phases(facts: RunFacts) -> Spec:
    row_px = max(4, min(26, 1600 // len(facts.ranks)))
    words, colours = _shown(facts.phases)
    order = {"field": "order", "type": "quantitative"}
    number = {"calculate": f"indexof({words}, datum.phase)", "as": "order"}
    tooltip = [{"field": "rank"}, {"field": "phase"}, {"field": "ms", "type": "quantitative", "format": ".3~f", "title": "ms"}]
    return _chart(
        _in_words(facts.phases),
        height=row_px * len(facts.ranks),
        params=_STEP,
        transform=[_OF_STEP, number],
        mark={"type": "bar"},
        encoding={
            "y": _nominal("rank", None, scale={"domain": facts.ranks}),
            "x": _axis("ms", "milliseconds of an iteration", stack="zero", axis={"tickCount": 5}),
            "color": _phase_color(words, colours),
            "order": order,
            "tooltip": tooltip,
        },
    )


def _loss(facts: RunFacts) -> Spec:
    values = [row["loss"] for row in facts.losses if row["loss"] is not None]
    logarithmic = min(values) > 0 and max(values) / min(values) > 20
    scale = {"type": "log", "nice": False} if logarithmic else {"zero": False}
    shown = [what for what in _LOSSES if any(row["what"] == what for row in facts.losses)]
    legend = {"orient": "bottom"} if len(shown) > 1 else None
    dash = _nominal("what", None, scale={"domain": shown, "range": [_LOSSES[what] for what in shown]}, legend=legend)
    ticks: Spec = {"tickCount": 5} if min(values) < max(values) else {"format": ".4~g"}  # a single value would be rounded
    y = _axis("loss", "loss (logarithmic)" if logarithmic else "loss", scale=scale, axis=ticks)
    line = _lines(y, mark=_mark(facts.losses), strokeDash=dash)
    return _chart(facts.losses, height=240, layer=[line, _moved(facts)])


def _mark(rows: list[dict[str, Any]]) -> Spec:
    return {"point": {"color": _INK} if len(rows) <= 60 else False, "color": _INK}  # a line of one point is not seen


def _rate(facts: RunFacts) -> Spec:
    y = _axis("rate", "samples per second", scale={"zero": True}, axis={"tickCount": 5, "format": "~s"})
    return _chart(facts.rates, height=200, layer=[_lines(y, mark=_mark(facts.rates)), _moved(facts)])


def _speeds(facts: RunFacts) -> Spec:
    y = _axis("speed", "speed relative to the fastest", scale={"domain": [0, 1]}, axis={"tickCount": 5})
    line = _lines(y, mark={"interpolate": "step-after", "point": True}, color=_rank_color(facts))
    alarms = {
        "data": {"values": facts.alarms},
        "mark": {"type": "point", "shape": "triangle-down", "color": _INK, "filled": True, "size": 70},
        "encoding": {
            "x": _ITERATION,
            "y": {"value": 6},
            "tooltip": [{"field": "what"}, {"field": "slower", "title": "times as long", "format": ".3~f"}, {"field": "began"}],
        },
    }
    return _chart(facts.speeds, height=220, layer=[line, alarms, _moved(facts)] if facts.alarms else [line])


def _accounts(facts: RunFacts) -> Spec:
    y = _axis("share", "lost / price of moving", scale={"domainMin": 0}, axis={"tickCount": 5})
    dash = _nominal("what", None, legend={"orient": "bottom"})
    line = _lines(y, mark={"point": {"color": _INK}, "color": _INK}, strokeDash=dash)
    due = {
        "data": {"values": [{"share": 1}]},
        "mark": {"type": "rule", "color": _INK, "strokeDash": [4, 4]},
        "encoding": {"y": _axis("share", "lost / price of moving")},
    }
    return _chart(facts.accounts, height=220, layer=[line, due, _moved(facts)])


def _links(facts: RunFacts) -> Spec:
    most = max(row["size_bytes"] for row in facts.links)
    x = _nominal("target", "to", scale={"domain": facts.ranks}, axis={"labelAngle": 0, "labelOverlap": "greedy"})
    y = _nominal("source", "from", scale={"domain": facts.ranks})
    color = _axis(
        "size_bytes",
        "bytes of an iteration",
        scale={"domain": [0, most], "range": ["#e4e4e0", "#55554f"]},
        legend={"orient": "bottom", "format": "~s", "gradientLength": 220, "tickCount": 3},
    )
    tooltip = [{"field": "source", "title": "from"}, {"field": "target", "title": "to"}, {"field": "size_bytes", "format": ","}]
    cells = {"mark": "rect", "encoding": {"x": x, "y": y, "color": color, "tooltip": tooltip}}
    numbers = {
        "mark": {"type": "text", "fontSize": 11, "aria": False},
        "encoding": {
            "x": x,
            "y": y,
            "text": {"field": "size_bytes", "type": "quantitative", "format": ".2~s"},
            "color": {"condition": {"test": f"datum.size_bytes > {0.6 * most}", "value": "white"}, "value": "black"},
        },
    }
    side_px = max(4, min(36, 700 // len(facts.ranks)))
    layer = [cells, numbers] if len(facts.ranks) <= 8 else [cells]
    return _chart(facts.links, height=side_px * len(facts.ranks), params=_STEP, transform=[_OF_STEP], layer=layer)


def _moved(facts: RunFacts) -> Spec:
    """Rules where the tiling changed."""
    rows = [{"iteration": step["iteration"], "why": step["why"]} for step in facts.steps[1:]]
    return {
        "data": {"values": rows},
        "mark": {"type": "rule", "color": _INK, "strokeDash": [2, 3], "opacity": 0.6},
        "encoding": {"x": _ITERATION, "tooltip": {"field": "why"}},
    }
