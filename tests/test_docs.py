"""The site is built without a warning (no broken link, no missing reference), and its reference has every public name."""

import json
import os
import re
import shutil
import subprocess
import sys
from html import unescape
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

import pytest

import tatami

TOP = Path(__file__).parents[1]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
WIDTHS = (390, 1440)
LOOK = """<title></title><iframe style="border: 0; height: 900px"></iframe><script>
const frame = document.querySelector("iframe"), seen = {}, rest = PAGES.flatMap(page => WIDTHS.map(width => [page, width]));
function look() {
  if (!rest.length) { document.title = JSON.stringify(seen); return; }
  const [page, width] = rest.shift();
  frame.style.width = width + "px";
  frame.onload = () => {
    const root = frame.contentDocument.documentElement;
    const asked = frame.contentWindow.performance.getEntriesByType("resource").filter(each => !each.name.startsWith("file:"));
    const wide = [...frame.contentDocument.querySelectorAll("pre")].filter(each => each.scrollWidth > each.clientWidth);
    const cut = wide.filter(each => width > 1000 || !each.classList.contains("drawn"));  // a table may be scrolled on a phone
    seen[`${page} at ${width} px`] = [root.clientWidth, root.scrollWidth - root.clientWidth, asked.length, cut.length];
    look();
  };
  frame.src = page;
}
look();
</script>"""
"""Opens each page in a frame of each width: how wide it is, what does not fit, requests to a network, blocks that are cut."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without the pages of source, which take longer than all others."""
    folder = tmp_path_factory.mktemp("site")
    extensions = "extensions=myst_parser,sphinx.ext.autodoc,sphinx.ext.napoleon"
    strict = ["--fail-on-warning", "--keep-going", "--quiet"]
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", *strict, "-b", "html", "-D", extensions, "docs", str(folder)],
        cwd=TOP,
        env=os.environ | {"PYTHONPATH": str(TOP / "src")},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return folder


def documented(site: Path) -> set[str]:
    """The names that pages of the site can refer to."""
    from sphinx.util.inventory import InventoryFile

    with (site / "objects.inv").open("rb") as file:
        inventory = InventoryFile.load(file, "", lambda _base, target: target)
    return {name for domain, names in inventory.items() if domain.startswith("py:") for name in names}


@pytest.mark.timeout(1800)
def test_every_public_name_is_in_the_reference(site: Path) -> None:
    there = documented(site)
    packages = ["tatami", *(f"tatami.{module.name}" for module in iter_modules(tatami.__path__) if module.ispkg)]
    missing = []
    for package in packages:
        module = import_module(package)
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            homes = {f"{package}.{name}", f"tatami.{name}", f"{getattr(value, '__module__', package)}.{name}"}
            if not homes & there and name != "__version__" and not isinstance(value, ModuleType):
                missing.append(f"{package}.{name}")
    assert missing == []


@pytest.mark.timeout(1800)
def test_the_reference_begins_with_tile_and_hides_what_is_for_tests(site: Path) -> None:
    page = (site / "reference" / "tatami.html").read_text(encoding="utf-8")
    assert re.findall(r'<dt class="sig[^"]*" id="([\w.]+)"', page)[0] == "tatami.tile"
    signature = re.sub(r"<[^>]+>", "", page.partition('id="tatami.tile"')[2].partition("</dt>")[0])
    assert "planner: str = 'timed'" in unescape(signature)
    assert not re.search(r"\b(clock|pace)\b", signature)


def test_search_finds_the_section_on_learning_rate_schedules(site: Path) -> None:
    text = (site / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    found = [index["titleterms"][word] for word in ("learn", "rate", "schedul")]
    pages = set.intersection(*({each} if isinstance(each, int) else set(each) for each in found))
    assert [index["docnames"][number] for number in pages] == ["training"]


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here to open the pages in")
@pytest.mark.timeout(1800)
def test_every_page_fits_a_phone_and_a_desk_and_asks_for_nothing(site: Path, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    pages = sorted(str(page.relative_to(site)) for page in site.rglob("*.html") if "_modules" not in page.parts)
    look = site / "look.html"
    look.write_text(LOOK.replace("PAGES", json.dumps(pages)).replace("WIDTHS", json.dumps(WIDTHS)), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--enable-logging=stderr"]
    options += [
        "--hide-scrollbars",
        "--allow-file-access-from-files",
        f"--user-data-dir={tmp_path}",
        "--virtual-time-budget=600000",
    ]
    ran = subprocess.run(
        [CHROMIUM, *options, "--window-size=1600,1000", "--dump-dom", look.as_uri()],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    look.unlink()
    assert "CONSOLE" not in ran.stderr
    found = re.search(r"<title>(.*?)</title>", ran.stdout)
    assert found is not None, ran.stderr
    seen = json.loads(found[1])
    assert seen == {f"{page} at {width} px": [width, 0, 0, 0] for page in pages for width in WIDTHS}
