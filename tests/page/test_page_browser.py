"""The page in a browser: it draws, moves, asks for nothing, and says nothing on the console."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from page_rig import PAYLOAD, a_run, hostile, recorded

from tatami.report.page import RecordedRun, joined, page_of, read_run
from tatami.report.page.record_shapes import PHASES, STAGE_PHASES

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
LOOK = """addEventListener("load", () => setTimeout(() => {
  const slider = document.getElementById("step");
  slider.value = 2; slider.dispatchEvent(new Event("input"));
  setTimeout(() => {
    const right = Math.max(...[...document.querySelectorAll("body *")].map(each => each.getBoundingClientRect().right));
    const tiles = document.querySelectorAll("#floor .mark-rect path").length;
    const bars = document.querySelectorAll("#phases .mark-rect path").length;
    const requests = performance.getEntriesByType("resource").length;
    const told = document.getElementById("told").textContent;
    const images = document.images.length;
    const seen = { right, tiles, bars, requests, told, images, drawn: document.documentElement.dataset.drawn };
    document.title = JSON.stringify(seen);
  }, 1000);
}, 2000));"""


def seen_in_a_browser(run: RecordedRun, folder: Path, *, width: int) -> dict[str, Any]:
    """What `LOOK` saw; nothing was said on the console. Windows are 500 pixels wide at least."""
    assert CHROMIUM is not None
    page = folder / "run.html"
    allowed = f"script-src 'sha256-{base64.b64encode(hashlib.sha256(LOOK.encode()).digest()).decode()}'"
    text = page_of(run, title=f"run {PAYLOAD}").replace("script-src", allowed, 1)
    look = f"<style>html {{ width: {width}px }}</style><script>{LOOK}</script></head>"
    page.write_text(text.replace("</head>", look, 1), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--enable-logging=stderr"]
    options += [f"--user-data-dir={folder / 'chromium'}", "--virtual-time-budget=20000"]
    options.append(f"--window-size={max(width, 500)},1600")
    ran = subprocess.run(
        [CHROMIUM, *options, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=800, check=False
    )
    assert "CONSOLE" not in ran.stderr
    found = re.search(r"<title>(.*?)</title>", ran.stdout)
    assert found is not None, ran.stderr
    seen: dict[str, Any] = json.loads(unescape(found[1]))
    return seen


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here to open the page in")
@pytest.mark.parametrize("width", [390, 1440])
def test_in_a_browser_it_draws_moves_and_asks_for_nothing(tmp_path: Path, width: int) -> None:
    seen = seen_in_a_browser(recorded(a_run()), tmp_path, width=width)
    assert (seen["drawn"], seen["requests"], seen["tiles"], seen["bars"]) == ("6", 0, 4, 4 * len(PHASES))
    assert seen["told"].startswith("3 of 4, after iteration 80: 4 tiles")
    assert seen["right"] <= width


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here to open the page in")
def test_a_browser_runs_nothing_that_stands_in_the_records(tmp_path: Path) -> None:
    """A page that had taken a name as HTML would have an image, and its script would have replaced the title."""
    seen = seen_in_a_browser(recorded(hostile(a_run())), tmp_path, width=1440)
    assert (seen["drawn"], seen["requests"], seen["images"], seen["tiles"]) == ("6", 0, 0, 4)
    assert seen["told"].endswith(f"tiling of 80{PAYLOAD}")


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here to open the page in")
@pytest.mark.parametrize("width", [390, 1440])
def test_a_real_run_with_three_retilings_and_a_death_in_a_browser(tmp_path: Path, width: int) -> None:
    """What `benchmarks/pictures.py` has recorded, and draws for docs/pictures."""
    run = joined([read_run(RESULTS / name) for name in ("report.jsonl", "report-repairs.json")])
    assert [record["reason"] for record in run.of("members")] == ["p3 joined", "p1 leaves", "p4 joined", "p3 died"]
    seen = seen_in_a_browser(run, tmp_path, width=width)
    tilings = run.of("tiling")
    assert len(tilings) == 5
    assert (seen["drawn"], seen["requests"], seen["tiles"]) == ("6", 0, len(tilings[2]["tiling"]["tiles"]))
    assert seen["bars"] == len(tilings[2]["tiling"]["tiles"]) * (len(PHASES) - len(STAGE_PHASES))
    assert seen["right"] <= width
