"""The charts of the page, as specifications of Vega-Lite. Colours are those of the text, but for ranks and phases.

Charts of one tiling have a parameter `step`, which the slider of the page sets.
"""

from __future__ import annotations

from typing import Any

from tatami.page.facts import PHASES, RunFacts

Spec = dict[str, Any]
_STEP = [{"name": "step", "value": 0}]
_OF_STEP = {"filter": "datum.step == step"}
_LOSSES = {"training": "#4c78a8", "validation": "#f58518"}
_RANKS_NAMED = 12
"""A legend or a number in a cell is left out where there are more ranks: the labels of tiles and axes tell."""


def charts_of(facts: RunFacts) -> dict[str, Spec]:
    """The specification of each chart for which there is anything, by the name of its section."""
    charts = {}
    if facts.tiles:
        charts["floor"] = _floor(facts)
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
    return {"field": "rank", "type": "nominal", "scale": {"domain": facts.ranks, "scheme": "tableau10"}, "legend": shown}


def _axis(name: str, title: str, **more: Any) -> Spec:
    return {"field": name, "type": "quantitative", "title": title, **more}


def _nominal(name: str, title: str | None, **more: Any) -> Spec:
    return {"field": name, "type": "nominal", "title": title, **more}


def _lines(y: Spec, *, mark: Spec, **encoding: Spec) -> Spec:
    """Over iterations."""
    return {
        "mark": {"type": "line", "strokeWidth": 2, "tooltip": True, **mark},
        "encoding": {"x": _axis("iteration", "iteration"), "y": y, **encoding},
    }


def _floor(facts: RunFacts) -> Spec:
    samples, units = max(step["samples"] for step in facts.steps), max(step["units"] for step in facts.steps)
    x = _axis("x1", "samples", scale={"domain": [0, samples], "nice": False}, axis={"grid": False, "tickCount": 5})
    y = _axis("y1", "units", scale={"domain": [0, units], "nice": False, "reverse": True}, axis={"grid": False, "tickCount": 5})
    tooltip = [{"field": name, "title": name} for name in ("rank", "samples", "units")]
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
        "mark": {"type": "text", "color": "black", "fontSize": 12, "aria": False},
        "encoding": {"x": {**x, "field": "x"}, "y": {**y, "field": "y"}, "text": {"field": "rank"}},
    }
    derive = [
        _OF_STEP,
        {"calculate": "(datum.x1 + datum.x2) / 2", "as": "x"},
        {"calculate": "(datum.y1 + datum.y2) / 2", "as": "y"},
        {"calculate": "datum.x1 + ' to ' + datum.x2", "as": "samples"},
        {"calculate": "datum.y1 + ' to ' + datum.y2", "as": "units"},
    ]
    return _chart(facts.tiles, height=320, params=_STEP, transform=derive, layer=[tiles, labels])


def _phases(facts: RunFacts) -> Spec:
    row_px = max(4, min(26, 1600 // len(facts.ranks)))
    scale = {"domain": list(PHASES), "range": ["#4c78a8", "#e45756", "#72b7b2", "#f58518", "#54a24b"]}
    order = {"field": "order", "type": "quantitative"}
    number = {"calculate": f"indexof({list(PHASES)}, datum.phase)", "as": "order"}
    tooltip = [{"field": "rank"}, {"field": "phase"}, {"field": "ms", "type": "quantitative", "format": ".3~f", "title": "ms"}]
    return _chart(
        facts.phases,
        height=row_px * len(facts.ranks),
        params=_STEP,
        transform=[_OF_STEP, number],
        mark={"type": "bar"},
        encoding={
            "y": _nominal("rank", None, scale={"domain": facts.ranks}),
            "x": _axis("ms", "milliseconds of an iteration", stack="zero", axis={"tickCount": 5}),
            "color": _nominal("phase", None, scale=scale, legend={"orient": "bottom", "columns": 3}),
            "order": order,
            "tooltip": tooltip,
        },
    )


def _loss(facts: RunFacts) -> Spec:
    values = [row["loss"] for row in facts.losses if row["loss"] is not None]
    logarithmic = min(values) > 0 and max(values) / min(values) > 20
    scale = {"type": "log", "nice": False} if logarithmic else {"zero": False}
    told = {row["what"] for row in facts.losses}
    colours = {what: colour for what, colour in _LOSSES.items() if what in told}
    legend = {"orient": "bottom"} if len(colours) > 1 else None
    color = _nominal("what", None, scale={"domain": list(colours), "range": list(colours.values())}, legend=legend)
    dash = {**color, "scale": {"domain": list(colours)}}
    y = _axis("loss", "loss (logarithmic)" if logarithmic else "loss", scale=scale, axis={"tickCount": 5})
    line = _lines(y, mark={"point": len(values) <= 60}, color=color, strokeDash=dash)
    return _chart(facts.losses, height=240, layer=[line, _moved(facts)])


def _rate(facts: RunFacts) -> Spec:
    y = _axis("rate", "samples per second", scale={"zero": True}, axis={"tickCount": 5, "format": "~s"})
    return _chart(facts.rates, height=200, layer=[_lines(y, mark={"color": "#4c78a8"}), _moved(facts)])


def _speeds(facts: RunFacts) -> Spec:
    y = _axis("speed", "speed, of the fastest", scale={"domain": [0, 1]}, axis={"tickCount": 5})
    line = _lines(y, mark={"interpolate": "step-after", "point": True}, color=_rank_color(facts))
    alarms = {
        "data": {"values": facts.alarms},
        "mark": {"type": "point", "shape": "triangle-down", "color": "currentColor", "filled": True, "size": 70},
        "encoding": {
            "x": _axis("iteration", "iteration"),
            "y": {"value": 6},
            "tooltip": [{"field": "what"}, {"field": "slower", "title": "times as long", "format": ".3~f"}, {"field": "began"}],
        },
    }
    return _chart(facts.speeds, height=220, layer=[line, alarms, _moved(facts)] if facts.alarms else [line])


def _accounts(facts: RunFacts) -> Spec:
    y = _axis("share", "lost / price of moving", scale={"domainMin": 0}, axis={"tickCount": 5})
    line = _lines(y, mark={"point": True}, color=_nominal("what", None, legend={"orient": "bottom"}))
    due = {
        "data": {"values": [{"share": 1}]},
        "mark": {"type": "rule", "color": "currentColor", "strokeDash": [4, 4]},
        "encoding": {"y": _axis("share", "lost / price of moving")},
    }
    return _chart(facts.accounts, height=220, layer=[line, due, _moved(facts)])


def _links(facts: RunFacts) -> Spec:
    most = max(row["size_bytes"] for row in facts.links)
    x = _nominal("target", "to", scale={"domain": facts.ranks}, axis={"labelAngle": 0})
    y = _nominal("source", "from", scale={"domain": facts.ranks})
    color = _axis(
        "size_bytes",
        "bytes of an iteration",
        scale={"domain": [0, most], "range": ["#dfe8f1", "#2f6ca3"]},
        legend={"orient": "bottom", "format": "~s", "gradientLength": 220},
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
        "mark": {"type": "rule", "color": "currentColor", "strokeDash": [2, 3], "opacity": 0.6},
        "encoding": {"x": _axis("iteration", "iteration"), "tooltip": {"field": "why"}},
    }
