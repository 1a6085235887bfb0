"""What a run that ended before its last round leaves behind, and how to go on from there."""

from __future__ import annotations

from pathlib import Path


def aftermath(*, report: Path | str | None, directory: Path | str | None) -> str:
    """Sentences, each with a space before it, for the end of an error; "" where the run leaves nothing.

    Args:
        report: the file that says what happened.
        directory: of checkpoints.
    """
    from tatami.server import checkpoints  # brings numpy, which the witness needs at its end only

    said = "" if report is None else f" What happened is in {report}."
    if directory is not None and (saved := checkpoints.versions(Path(directory))):
        said += (
            f" The state of version {saved[-1]} is saved in {directory}: "
            f"`tatami server resume {directory}` or tatami.server.resume({str(directory)!r}, ...) goes on from there."
        )
    return said
