"""All files of the package: no circle of imports, no words that are not meant, a device and a dtype for every tensor."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

import tatami

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


ROOT = Path(__file__).parents[1]


FORBIDDEN = {
    r"nobody|whoever|whomever|somebody|everybody": "name the subject: no rank, the process that ..., all workers",
    r"be it": "write 'also when ...'",
    r"anew": "again, or re-tile",
    r"can not": "cannot",
    r"(?:what|that) cannot be(?=[.,;:])": "invalid ...",
    r"(?<!there )(?:is|are) no (?:\w+ )?(?:tensor|file|folder|number|module|event|name|names|TOML|text)": "is not a ...",
    r"aforesaid|thereof|whereby|hence|whence|thence|nought|lest|likewise|farewell": "a word of today",
    r"for ever": "forever",
    r"choose of": "choose one of",
    r"everyone's": "all ranks'",
    r"in the place of": "in place of",
    r"what came of": "the result of",
    r"is none of puts|slip of the pen|taken in kindly|or the like": "say what is meant",
}
"""As whole words. A picture of mats is for the name, the page of the concept and the logo."""
MATS_ARE_FOR = {"README.md", "docs/concepts.md"}


def places(pattern: str, texts: dict[str, str]) -> list[str]:
    """Where it stands: file and line, and the line."""
    found = re.compile(rf"\b(?:{pattern})(?!\w)", re.IGNORECASE)
    return [
        f"{name}:{number}: {line.strip()}"
        for name, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        if found.search(line)
    ]


def all_texts() -> dict[str, str]:
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    return {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in sorted(files)}


def test_the_words_are_plain() -> None:
    texts = all_texts()
    assert len(texts) > 300
    found = [f"{where} -> {advice}" for pattern, advice in FORBIDDEN.items() for where in places(pattern, texts)]
    elsewhere = {name: text for name, text in texts.items() if name not in MATS_ARE_FOR}
    found += [f"{where} -> a tile is a tile" for where in places("mats?", elsewhere)]
    assert not found, "\n".join(found)


def test_a_phrase_is_found_as_whole_words() -> None:
    texts = {"a.py": "x = 1\n# Nobody waits.\nformat, canny, matrix\n", "b.md": "speeds that cannot be, or that cannot be read"}
    assert places("nobody|whoever", texts) == ["a.py:2: # Nobody waits."]
    assert places("mats?", texts) == []
    assert places(r"(?:what|that) cannot be(?=[.,;:])", texts) == ["b.md:1: speeds that cannot be, or that cannot be read"]


PACKAGE = Path(tatami.__file__).parent
PACKAGES = ("tiled", "comm", "parallel", "functions")

MAKERS = frozenset({
    "empty", "zeros", "ones", "full", "tensor", "arange", "eye", "rand", "randn", "randint", "randperm", "linspace", "logspace",
    "scalar_tensor", "empty_strided",
})  # fmt: skip
LIKE = frozenset({"new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"})
"""Methods of a tensor that is at hand, of whose device and dtype the new one is."""
HOST = frozenset({"frombuffer"})
"""Views of memory of the host, which have no other device; they need a dtype."""
NOT_COMPUTING = {"runtime/torch_norms.py": "a trial of torch's own functions, when tatami is loaded"}


def unsaid(source: str) -> list[tuple[int, str]]:
    """The line and the text of every tensor that is made without saying its device or its dtype."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, name = node.func.value, node.func.attr
        if not (isinstance(owner, ast.Name) and owner.id == "torch"):
            continue
        said = {keyword.arg for keyword in node.keywords}
        needed = {"dtype", "device"} if name in MAKERS else {"dtype"} if name in HOST else set()
        if needed - said and None not in said:
            found.append((node.lineno, ast.unparse(node)))
    return found


def files() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (PACKAGE / package).rglob("*.py"))


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_new_tensor_says_its_device_and_dtype(path: Path) -> None:
    if str(path.relative_to(PACKAGE)) in NOT_COMPUTING:
        return
    lines = [f"{path.relative_to(PACKAGE)}:{line}: {text}" for line, text in unsaid(path.read_text(encoding="utf-8"))]
    assert lines == [], "take device and dtype from a tensor that is at hand, or say device='cpu' where it is the host's"


def test_the_search_finds_what_it_is_for() -> None:
    source = """
a = torch.zeros(3)
b = torch.zeros(3, dtype=x.dtype)
c = torch.zeros(3, device=x.device)
d = torch.zeros(3, dtype=x.dtype, device=x.device)
e = x.new_zeros(3)
f = torch.zeros_like(x)
g = torch.arange(3, **kinds)
h = torch.frombuffer(data)
"""
    assert [line for line, _ in unsaid(source)] == [2, 3, 4, 9]


def test_what_is_left_out_is_there() -> None:
    assert all((PACKAGE / name).is_file() for name in NOT_COMPUTING)


def test_host_memory_of_a_device_is_taken_in_one_place() -> None:
    """Nothing copies a device tensor to the host to send it, but the one file that says so."""
    pinning = [path for path in files() if "pin_memory" in path.read_text(encoding="utf-8")]
    assert [str(path.relative_to(PACKAGE)) for path in pinning] == ["comm/staging.py"]


def test_every_test_of_ranks_is_run_under_mpiexec() -> None:
    """`make test` gives mpiexec the files that it finds by their text, and leaves out worlds of one, three and four threads."""
    root = SOURCE.parent
    asking = set()
    for path in (root / "tests").rglob("test_*.py"):
        tests = (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.FunctionDef))
        given = [{each.arg for each in test.args.args} for test in tests if test.name.startswith("test_")]
        if any({"world", "comm"} & each for each in given):
            asking.add(str(path.relative_to(root)))
    listed = subprocess.run(["make", "-s", "world-tests"], cwd=root, capture_output=True, text=True, check=True, timeout=60)
    assert asking - set(listed.stdout.split()) == set()
