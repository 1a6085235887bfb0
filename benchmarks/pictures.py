"""The pictures of the documents:  python benchmarks/pictures.py [tiling course server torus report screenshots]

`report` makes a real elastic run, which three changes of its ranks and a death re-tile, and keeps what it recorded in
benchmarks/results; `screenshots` opens the report of that in Chromium. The others write docs/pictures at once.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tatami
from schedule_drawing import draw_schedule
from tatami import server
from tatami.collective import build
from tatami.datasets import load
from tatami.elastic import ElasticContext, ElasticControl, ElasticSettings, run_elastic
from tatami.records import Records
from tatami.report import blank, save
from tatami.report.page import joined, page_of, read_run
from tatami.report.ray_runs import draw_timeline
from tatami.testing.slowdown import Slowdown
from tatami.train import Callback

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
LOG, REPAIRS = (ROOT / "benchmarks" / "results" / name for name in ("report.jsonl", "report-repairs.json"))
SPEEDS = {"p0": 1.0, "p1": 0.5, "p2": 0.4, "p3": 1.0, "p4": 0.7}
"""Of the ranks of the report's run, which play machines of these speeds; p3 and p4 join."""
EVERY = 40
"""Updates from one change of the ranks to the next, once they are let in."""
BATCH = 960


class Story(Callback):
    """What happens in the report's run: rank 0 says when the next change is due, and p3 dies when p4 has joined."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._num_changes = self._num_since = 0

    def on_train_batch_end(self, trainer: Any, loss: float) -> None:  # noqa: ARG002
        time.sleep(0.05)  # a newcomer needs seconds to start, and the run is not to be over by then
        names = trainer.model.names
        if names != self._names:
            self._num_changes += bool(self._names)
            self._names, self._num_since = names, 0
        self._num_since += 1
        if self._num_since == EVERY and {"p3", "p4"} <= set(names) and trainer.model.name == "p3":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._num_since == EVERY and trainer.model.name == "p0":
            print(f"change {self._num_changes}", flush=True)
            trainer.should_stop = "p4" in names and "p3" not in names


def rank_of_the_story() -> None:
    """What each rank of the report's run does."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    comm: Any = tatami.init()
    own = comm.names[comm.rank]
    train, test = load("digits", targets="classes").split(test_fraction=0.2, seed=0)
    model = tatami.tile(
        nn.Sequential(nn.Linear(64, 80), nn.Sigmoid(), nn.Linear(80, 10)),
        comm,
        batch_size=BATCH,
        speeds=[SPEEDS[name] for name in comm.names],
        planner="srpm",
        reduction="mean",
        quiet=True,
        pace=Slowdown(max(SPEEDS.values()) / SPEEDS[own]),
    )
    settings = {"net": "64-80-10", "batch_size": BATCH, "planner": "srpm", "speeds": SPEEDS}
    with Records(LOG if own == "p0" else None, force=True, settings=settings) as records:
        trainer = tatami.Trainer(
            model,
            optimizer=partial(torch.optim.SGD, lr=0.5),
            loss=nn.CrossEntropyLoss(),
            records=records,
            callbacks=[Story()],
        )
        trainer.fit((train.x, train.y), batch_size=BATCH, epochs=100_000, validation=(test.x, test.y))


def report() -> None:
    """The run of the report: p3 joins, p1 leaves, p4 joins, p3 dies."""
    controls: list[ElasticControl] = []

    def listen(name: str, text: str) -> None:
        print(f"{name}: {text}", flush=True)
        if text in ("change 0", "change 2"):
            controls[0].add()
        elif text == "change 1":
            controls[0].remove("p1")

    settings = ElasticSettings(ranks=3, planner="srpm", patience_s=300)
    context = ElasticContext(on_start=controls.append, on_change=print, on_line=listen)
    result = run_elastic(rank_of_the_story, settings=settings, context=context)
    result.report.save(REPAIRS, force=True)


def screenshots() -> None:
    """The report of that run as a browser shows it."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("there is no Chromium here")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        run = joined([read_run(LOG), read_run(REPAIRS)])
        page.write_text(page_of(run, title="Three re-tilings and a death"), encoding="utf-8")
        for width in (390, 1440):
            screenshot(chromium, page, PICTURES / f"report-{width}.png", width=width)


def screenshot(chromium: str, page: Path, picture: Path, *, width: int, height: int = 5000) -> None:
    """What is seen of `page`, so many pixels wide; empty rows at the end are cut off. Windows are 500 wide at least."""
    from PIL import Image, ImageChops

    seen = page
    if width < 500:
        seen = page.with_name("frame.html")
        style = f"border:0;width:{width}px;height:{height}px"
        seen.write_text(f'<body style="margin:0"><iframe src="{page.name}" style="{style}"></iframe>', encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=20000"]
    options += [f"--user-data-dir={page.parent / 'chromium'}", f"--window-size={max(width, 500)},{height}"]
    subprocess.run([chromium, *options, f"--screenshot={picture}", seen.as_uri()], check=True, capture_output=True, timeout=300)
    with Image.open(picture) as image:
        shown = image.convert("RGB").crop((0, 0, width, height))
    empty = Image.new("RGB", shown.size, shown.getpixel((0, height - 1)))
    box = ImageChops.difference(shown, empty).getbbox()
    bottom = height if box is None else min(height, box[3] + 16)
    shown.crop((0, 0, width, bottom)).quantize(160).save(picture, optimize=True)


def tiling() -> None:
    """Eight unequal processors under SRPM: the floor on the first page."""
    speeds = "0.25,0.31,0.63,1,1,0.42,0.67,0.63"
    options = ["--net", "203-80-26", "--samples", "1024", "--planner", "srpm", "--force"]
    _tatami("plan", "--speeds", speeds, *options, "--plot", str(PICTURES / "tiling.png"))


def course() -> None:
    """The course of `tatami demo`."""
    with tempfile.TemporaryDirectory() as folder:
        _tatami("demo", "--out", folder)
        shutil.copy(Path(folder) / "course.png", PICTURES / "course.png")


def network_of_the_server() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 80), nn.Tanh(), nn.Linear(80, 10))


def slow_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    time.sleep(0.5)  # in place of computing, so that four workers fit on any machine
    return nn.functional.cross_entropy(output, target)


def timeline() -> None:
    """A parameter server of which a worker and a server are killed, and a worker is stopped."""

    blows = [("worker 1", signal.SIGKILL), ("server 0", signal.SIGKILL), ("worker 3", signal.SIGSTOP)]
    last = 0

    def strike(run: server.RunControl) -> None:
        """After every eighth round at the earliest, and when the spare is up again, however busy the machine is."""
        nonlocal last
        pids = run.pids()
        if blows and run.version >= last + 8 and any(name.startswith("spare") for name in pids) and blows[0][0] in pids:
            name, how = blows.pop(0)
            os.kill(pids[name], how)
            last = run.version

    data = load("digits", targets="classes")
    settings = server.RunSettings(rounds=40, workers=4, servers=2, spares=1, replicas=2, heartbeat_s=2.0)
    context = server.RunContext(on_round=strike)
    outcome = server.train(network_of_the_server, slow_loss, dataset=(data.x, data.y), settings=settings, context=context)
    figure, ax = blank()
    draw_timeline(ax, outcome[1])
    save(figure, PICTURES / "server-timeline.png", force=True)


def torus() -> None:
    """An all-reduce of two hosts of four ranks, as the torus has it."""
    from matplotlib.figure import Figure

    schedule = build("torus_put", ranks=8, size=64, hosts=["a"] * 4 + ["b"] * 4, across="native")
    figure = Figure(figsize=(6.6, 3.4), layout="constrained")
    draw_schedule(figure.subplots(2, 2).flat, schedule, columns=4)
    save(figure, PICTURES / "torus.png", force=True)


def _tatami(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "tatami", *words], check=True, timeout=1200)


MAKERS = {
    "tiling": tiling,
    "course": course,
    "server": timeline,
    "torus": torus,
    "report": report,
    "screenshots": screenshots,
}

if __name__ == "__main__":
    for wanted in sys.argv[1:] or MAKERS:
        MAKERS[wanted]()
