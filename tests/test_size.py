"""There are no more lines of Python than CONTRIBUTING says; `pytest -s tests/test_size.py` prints them by package."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def lines_of(folder: Path) -> Counter[str]:
    """Lines below a folder, by the package or folder inside of it; files of its own by their name."""
    found: Counter[str] = Counter()
    for path in folder.rglob("*.py"):
        found[path.relative_to(folder).parts[0]] += len(path.read_text(encoding="utf-8").splitlines())
    return found


@pytest.mark.parametrize(("folder", "inside"), [("src", "src/tatami"), ("tests", "tests")])
def test_there_are_no_more_lines_than_contributing_says(folder: str, inside: str) -> None:
    found = lines_of(ROOT / inside)
    for name, lines in found.most_common():
        print(f"{lines:7,} {inside}/{name}")
    stated = re.search(rf"`{folder}` has at most ([\d,]+) lines", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert stated is not None
    most = int(stated[1].replace(",", ""))
    assert found.total() <= most, (
        f"{folder} has {found.total():,} lines: delete some, or write the new number into CONTRIBUTING.md"
    )
