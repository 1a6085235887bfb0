"""One word, one thing: public class names are defined once, and the glossary tells of what there is."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
GLOSSARY = ROOT / "docs" / "glossary.md"
CODE = re.compile(r"`([^`]+)`")
DOTTED = re.compile(r"`(?:@|with )?(tatami(?:\.\w+)+)")
CLASS_NAME = re.compile(r"[A-Z]+[a-z]\w*")


def twice_defined(source: Path) -> dict[str, list[str]]:
    """Every public class name that has another meaning, too, below `source`: as a class or as an alias; with all places."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(source.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path.relative_to(source)}:{node.lineno}")
    for path in sorted(source.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = (
                [target.id for target in node.targets if isinstance(target, ast.Name)] if isinstance(node, ast.Assign) else []
            )
            for name in names:
                if name in places:
                    places[name].append(f"{path.relative_to(source)}:{node.lineno}")
    return {name: where for name, where in places.items() if len(where) > 1}


def bound(name: str) -> bool:
    """Whether the dotted `name` is a module below `SOURCE`, or a name that a module binds at its top."""
    words = name.split(".")
    for end in range(len(words), 0, -1):
        stem = SOURCE.joinpath(*words[:end])
        path = stem / "__init__.py" if stem.is_dir() else stem.with_suffix(".py")
        if path.exists():
            return words[end:] == [] or words[end:] in [[each] for each in names_at_the_top(path)]
    return False


def names_at_the_top(path: Path) -> Iterator[str]:
    """What a module defines, assigns or imports, also what it imports only when it is asked for."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in [*tree.body, *(inner for each in tree.body if isinstance(each, ast.If) for inner in each.body)]:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def rows() -> list[list[str]]:
    """The cells of the glossary's table: word, meaning, where."""
    lines = [line for line in GLOSSARY.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_public_class_name_is_defined_once() -> None:
    assert twice_defined(SOURCE / "tatami") == {}


def test_a_second_definition_is_told_with_both_places(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("class Job: ...\nclass _Private: ...\n")
    (tmp_path / "two.py").write_text("\n\nclass Job: ...\nclass _Private: ...\nclass Place: ...\n")
    (tmp_path / "three.py").write_text("Place = tuple[int, int]\nKey = int\n")
    assert twice_defined(tmp_path) == {"Job": ["one.py:1", "two.py:3"], "Place": ["two.py:5", "three.py:1"]}


def test_the_glossary_is_alphabetical_and_has_every_word_once() -> None:
    words = [word.lower() for word, _, _ in rows()]
    assert len(words) > 50
    assert words == sorted(set(words))


def test_every_meaning_is_a_sentence_and_every_place_exists() -> None:
    for word, meaning, where in rows():
        assert meaning[0].isupper(), word
        assert meaning.endswith("."), word
        assert CODE.findall(where), f"{word}: no place in the code"
        missing = [name for name in CODE.findall(where) if not bound(name)]
        assert not missing, f"{word}: the code has no {', '.join(missing)}"


def test_every_class_that_the_glossary_names_exists() -> None:
    defined = {
        node.name
        for path in (SOURCE / "tatami").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    }
    quoted = CODE.findall(GLOSSARY.read_text(encoding="utf-8"))
    named = {part for text in quoted for part in text.split(".") if CLASS_NAME.fullmatch(part)}
    assert "Tile" in named
    assert named <= defined, "the glossary names classes that do not exist"


def test_every_name_that_a_page_speaks_of_exists() -> None:
    """In lines of text; `test_documents.py` looks at blocks of code. The changelog tells of names that are gone."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    found = {(page.name, name) for page in pages for name in DOTTED.findall(page.read_text(encoding="utf-8"))}
    assert len(found) > 100
    assert sorted(f"{page}: {name}" for page, name in found if not bound(name)) == []


def test_the_glossary_is_in_the_list_of_what_to_read() -> None:
    assert "(docs/glossary.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
