"""`tatami examples`: copy the examples into a folder."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Annotated

import typer

import tatami
from tatami.cli.options import epilog
from tatami.cli.terminal import show
from tatami.errors import InputError
from tatami.outputs import check_output, write_bytes

EPILOG = epilog("tatami examples", "tatami run -n 4 tatami-examples/ten_lines.py")


def examples(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder for the examples.")] = Path("tatami-examples"),
    *,
    only_list: Annotated[bool, typer.Option("--list", help="List the examples and copy nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that exist.")] = False,
) -> None:
    """Copy the examples into a folder, to run and change them. Each is one file; its first lines say how to start it."""
    files = example_files()
    if not only_list:
        for file in files:
            check_output(folder / file.name, force=force)
        for file in files:
            write_bytes(folder / file.name, file.read_bytes(), force=force)
    across = max(len(file.name) for file in files)
    for file in files:
        show(f"{file.name:<{across}}  {_what(file)}")
    if not only_list:
        show("", f"{len(files)} files in {folder}. Next: tatami run -n 4 {folder / 'ten_lines.py'}")


def example_files() -> list[Path]:
    """Find the examples, inside the installed package or next to it in a checkout.

    Raises:
        InputError: there are no examples in either place.
    """
    package = Path(tatami.__file__).parent
    for folder in (package / "examples", package.parents[1] / "examples"):
        if (folder / "ten_lines.py").is_file():
            return sorted(file for file in folder.iterdir() if file.suffix in (".py", ".toml", ".ipynb"))
    raise InputError(f"there are no examples in {package}: this Tatami was installed without them; install it from its wheel")


def _what(file: Path) -> str:
    """Return the first sentence of an example."""
    if file.suffix == ".toml":
        return "A cluster file, with every key explained."
    if file.suffix == ".ipynb":
        return "A notebook whose ranks are threads."
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return text.split(". ")[0].split(".\n")[0].replace("\n", " ").rstrip(".") + "."
