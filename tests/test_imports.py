"""No two files import each other, not even for types: each can be read after those that it imports."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"


def imports_of(source: Path) -> dict[str, set[str]]:
    """The modules below `source`, each with those of them that it imports anywhere in its file."""
    modules = {
        ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): path
        for path in source.rglob("*.py")
    }
    found: dict[str, set[str]] = {}
    for name, path in modules.items():
        imported = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                imported |= (inner & modules.keys()) or {node.module}
        found[name] = (imported & modules.keys()) - {name}
    return found


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Modules of which each imports the next, and the last the first; none where there is no circle."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return path[path.index(name) :]
        if name in done:
            return []
        for following in sorted(imports[name]):
            if found := visit(following, [*path, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(imports) if (found := visit(name, []))), [])


def test_no_files_import_each_other() -> None:
    assert circle(imports_of(SOURCE)) == []


def test_a_circle_is_told_with_its_files(tmp_path: Path) -> None:
    package = tmp_path / "house"
    package.mkdir()
    (package / "__init__.py").write_text("from house.roof import ROOF\n")
    (package / "roof.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house import wall\nROOF = 1\n"
    )
    (package / "wall.py").write_text("import house.floor\n")
    (package / "floor.py").write_text("def build():\n    from house.roof import ROOF\n")
    assert circle(imports_of(tmp_path)) == ["house.roof", "house.wall", "house.floor"]
