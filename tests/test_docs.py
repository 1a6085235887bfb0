"""The site is built without a warning (no broken link, no missing reference), and its reference has every public name."""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

import pytest

import tatami

TOP = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "-b", "html", "docs", str(folder)],
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
