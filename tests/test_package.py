"""The package as a whole: its public names, and what importing it does not load."""

import ast
import re
import subprocess
import sys
from importlib.metadata import distributions, version
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

import tatami
from tatami.distribution import DISTRIBUTION

HEAVY = ("torch", "mpi4py", "typer", "rich", "matplotlib", "sklearn")
PURE = ("errors", "units", "clock", "cluster", "workload", "tiling", "retiling", "collective", "report", "report.page")
PUBLIC = {
    "Cluster",
    "DataParallel",
    "Link",
    "MultiNodeBatchNorm",
    "MultiNodeChainList",
    "MultiNodeCheckpoint",
    "MultiNodeOptimizer",
    "ParallelConv",
    "Plan",
    "PlanComparison",
    "Processor",
    "Retiler",
    "TiledModel",
    "Tiling",
    "Trainer",
    "Workload",
    "__version__",
    "errors",
    "init",
    "load_training",
    "plan",
    "save_training",
    "scatter_dataset",
    "steps",
    "tile",
}


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=800, check=False)


def blocked(*names: str) -> str:
    """Code after which importing any of `names` fails as if it were not installed."""
    return (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {names!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Block())\n"
    )


def test_the_public_names() -> None:
    assert set(tatami.__all__) == PUBLIC
    assert set(tatami.__all__) <= set(dir(tatami))
    assert tatami.__version__ == version(DISTRIBUTION)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_resolves_and_stays_the_same(name: str) -> None:
    assert getattr(tatami, name) is getattr(tatami, name)


def test_an_unknown_name_is_an_attribute_error_that_lists_the_known() -> None:
    with pytest.raises(AttributeError, match="no attribute 'tiles'; it has Cluster, DataParallel, Link"):
        _ = tatami.tiles  # type: ignore[attr-defined]


def test_importing_and_planning_load_nothing_heavy() -> None:
    ran = python(
        "import sys, tatami\n"
        "cluster = tatami.Cluster.from_speeds([0.25, 0.31, 0.63, 1, 1])\n"
        "tatami.plan('srpm', cluster=cluster, workload=tatami.Workload.mlp(203, 80, 26, samples=1024))\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    assert (ran.stdout.strip(), ran.stderr) == ("[]", "")


def test_the_trainer_loads_nothing_of_the_wings() -> None:
    ran = python("import sys, tatami.train.trainer\nprint([name for name in sys.modules if name.startswith('tatami.')])")
    loaded = {name.split(".")[1] for name in ast.literal_eval(ran.stdout)}
    assert "train" in loaded
    assert loaded.isdisjoint({"functions", "parallel", "server", "elastic", "sim", "lab"})


def test_the_pure_packages_need_neither_torch_nor_mpi_nor_an_extra() -> None:
    ran = python(blocked(*HEAVY) + "".join(f"import tatami.{name}\n" for name in PURE) + "print('ok')")
    assert (ran.stdout.strip(), ran.stderr) == ("ok", "")


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_the_command_line_without_its_extra_names_the_pip_command(missing: str) -> None:
    ran = python(blocked(missing) + "import runpy\nrunpy.run_module('tatami', run_name='__main__')")
    assert ran.returncode == 1
    assert "pip install 'tatami-torch[cli]'" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_contributing_names_every_package_and_module_of_the_tree() -> None:
    tree = Path(tatami.__file__).parent
    folders = {f"{each.name}/" for each in tree.iterdir() if (each / "__init__.py").exists()}
    modules = {each.stem for each in tree.glob("*.py")} - {"__init__", "__main__"}
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_]+/?)`", text.partition("## How the tree reads")[2].partition("Outside of the package")[0]))
    assert folders | modules == named - {"tatami"}


def test_the_environment_installs_on_the_oldest_python() -> None:
    """Also on the first release of it, as some distributions have one of the first."""
    oldest = "3.11.0"
    pins = (Path(__file__).parent.parent / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in pins if "==" in line and not line.startswith("#")}
    asked = {
        each.metadata["Name"]: each.metadata["Requires-Python"]
        for each in distributions()
        if each.metadata["Name"].lower().replace("_", "-") in pinned and each.metadata["Requires-Python"]
    }
    assert len(asked) > 50
    assert {name: python for name, python in asked.items() if oldest not in SpecifierSet(python)} == {}
