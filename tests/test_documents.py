"""README and docs: programs and commands run as they are pasted, block by block; names that fragments use are there."""

import ast
import json
import os
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn

import tatami
from tatami.errors import InputError
from test_wheel import BLOCK as ANY_BLOCK
from test_wheel import run

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = (
    "tutorial.md",
    "training.md",
    "allreduce.md",
    "gpt-at-home.md",
    "from-ddp.md",
    "slurm.md",
    "ray.md",
    "notebook.md",
    "when-a-machine-dies.md",
)
"""Pages all of whose blocks run, one after the other, as a reader would paste them; the README's program is an example."""
BLOCK = re.compile(r"^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
NOT_RUN = {
    # The package index (test_wheel.py installs the wheel); machines of the reader's (tests/doctor).
    "tutorial.md": ("pip install ", "tatami doctor --hosts "),
    "training.md": (),
    # Machines of the reader's; what the tutorial does; what is compared below.
    "gpt-at-home.md": ("tatami doctor --hosts ", "tatami probe ", "tatami plan "),
    # It runs in test_examples.py, as does the program of fine-tuning.md.
    "when-a-machine-dies.md": ("tatami run --elastic ",),
}
"""Pages whose commands run, after the programs that the page has the reader save, and the commands that do not, the reason
above them.
`test_wheel.py` does so with the README but for `make`. Not here: labs, which need root (tests/lab), and Slurm (tests/comm)."""


def blocks(page: Path) -> list[tuple[str, str]]:
    """Where each block of Python stands, and its text after so many empty lines that errors name the page's lines."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start(1))
        found.append((f"{page.relative_to(ROOT)}:{line + 1}", "\n" * line + match[1]))
    return found


@pytest.mark.parametrize("page", PROGRAMS)
def test_programs_run_as_pasted(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    pasted = blocks(ROOT / "docs" / page)
    assert pasted
    for where, text in pasted:
        exec(compile(text, where, "exec"), namespace)


def commands(language: str, text: str) -> list[str]:
    """The lines of a block that a reader pastes into a shell."""
    lines = text.replace("\\\n", " ").splitlines()
    prompt = {"": "", "sh": "", "console": "$ "}.get(language)
    return [line.removeprefix(prompt) for line in lines if line.startswith(prompt)] if prompt is not None else []


@pytest.mark.parametrize("page", NOT_RUN)
def test_commands_run_as_pasted(page: str, tmp_path: Path) -> None:
    """All ranks on this machine, as the tutorial has it for those who have no second one: without `--hosts`."""
    text, end, left_out = (ROOT / "docs" / page).read_text(encoding="utf-8"), 0, set()
    environ = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    for match in ANY_BLOCK.finditer(text):
        named = re.findall(r"`(\w+\.py)`", text[end : match.start()])
        if match[1] == "python" and named and not (tmp_path / named[-1]).exists():  # later blocks are changes to it
            (tmp_path / named[-1]).write_text(match[2], encoding="utf-8")
        end = match.end()
        for command in commands(*match.groups()):
            if prefixes := {each for each in NOT_RUN[page] if command.startswith(each)}:
                left_out |= prefixes
                continue
            here = re.sub(r" --hosts \S+", "", command).replace("sleep 10", "exit 1")  # what fails is not started again
            run(["sh", "-ec", here], cwd=tmp_path, env=environ, timeout_s=850)
    assert left_out == set(NOT_RUN[page])


@pytest.mark.parametrize("page", ["README.md", "docs/gpt-at-home.md"])
def test_plans_are_shown_as_they_are_printed(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the files of the page: `home.toml` is its block of TOML."""
    testing = pytest.importorskip("typer.testing", reason="typer is not installed (extra `cli`)")
    cli = import_module("tatami.cli.app")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    text = (ROOT / page).read_text(encoding="utf-8")
    for block in re.findall(r"^```toml\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        Path("home.toml").write_text(block)
    shown = re.findall(r"^```console\n\$ tatami (plan .*?[^\\])\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert shown
    for command, output in shown:
        result = testing.CliRunner().invoke(cli.app, command.replace("\\\n", " ").split())
        assert result.exit_code == 0, result.output
        assert [line.rstrip() for line in result.stdout.rstrip().splitlines()] == output.splitlines()


def test_the_program_of_the_readme_is_an_example_that_tests_run() -> None:
    """By `test_examples.py`, as a job of 1, 2 and 3 ranks. The first line of the example says how it is started."""
    (program, *_) = [text.strip() for _, text in blocks(ROOT / "README.md")]
    example = (ROOT / "examples" / "ten_lines.py").read_text(encoding="utf-8")
    assert program == example.split('"""\n', 1)[1].strip()


def test_the_notebook_has_the_cells_of_its_page_which_run() -> None:
    cells = json.loads((ROOT / "examples" / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert code == [text.strip() for _, text in blocks(ROOT / "docs" / "notebook.md")]


def test_every_block_compiles_and_names_what_there_is() -> None:
    found = [block for page in PAGES for block in blocks(page)]
    assert len(found) > 10
    missing = [f"{where}: {name}" for where, text in found for name in named(ast.parse(text, where)) if not is_there(name)]
    assert missing == []


def named(tree: ast.AST) -> Iterator[str]:
    """Names of Tatami in a block: `tatami.tile`, `from tatami.comm import run_threads`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.split(".")[0] == "tatami":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and (name := ast.unparse(node)).startswith("tatami.") and "(" not in name:
            yield name


def is_there(name: str) -> bool:
    first, *parts = name.split(".")
    found, path = import_module(first), first
    for part in parts:
        path = f"{path}.{part}"
        if not hasattr(found, part):
            try:
                import_module(path)
            except ModuleNotFoundError:
                return False
        found = getattr(found, part)
    return True


def test_a_name_that_is_gone_is_found() -> None:
    assert list(named(ast.parse("from tatami.comm import gone\ntatami.plan(x)"))) == ["tatami.comm.gone", "tatami.plan"]
    assert not is_there("tatami.comm.gone")
    assert is_there("tatami.comm.run_threads")


def test_a_network_without_values_is_refused_by_name() -> None:
    network = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).to(torch.device("meta"))
    with pytest.raises(InputError, match="the weights lie on 'meta', where a tensor has a shape and no values"):
        tatami.tile(network, tatami.init(), batch_size=8, speeds="equal", reduction="mean")
