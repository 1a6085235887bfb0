"""Plain English: phrases that docstrings, errors, comments and documents do without, and what to write in their place."""

from __future__ import annotations

import re
from pathlib import Path

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
