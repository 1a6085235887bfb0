"""The table and the picture of the grid."""
from __future__ import annotations
from pathlib import Path
def write_report(records: Path) -> list[Path]:
    raise NotImplementedError
