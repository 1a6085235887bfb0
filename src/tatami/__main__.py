"""The command line: `tatami ...`, or `python -m tatami ...` where the script is not on the path."""

from __future__ import annotations

import sys

from tatami.errors import MissingExtraError

CLI_MODULES = frozenset({"rich", "typer"})


def main() -> None:
    """Run the command line; ends the process with 1 and the pip command where the `cli` extra is missing."""
    try:
        from tatami.cli.app import main as run
    except ModuleNotFoundError as error:
        # Any other module that is not found is a fault of ours and keeps its traceback.
        if error.name not in CLI_MODULES:
            raise
        sys.exit(str(MissingExtraError(f"{error.name}, which the command line needs,", extra="cli")))
    run()


if __name__ == "__main__":
    main()
