"""A Python file of the user: run for the values that it defines."""

from __future__ import annotations

import platform
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tatami.errors import InputError, shortened

_NAME = "tatami_script"


def read_script(path: Path, *, names: Sequence[str]) -> dict[str, Any]:
    """Run a script, not as `__main__`, and return the values it defines for `names`.

    Raises:
        InputError: the script does not exist, fails, ends the process, or does not define all of `names`.
    """
    if not path.is_file():
        raise InputError(f"there is no script {path}")
    sys.path.insert(0, str(path.resolve().parent))
    try:
        # As __main__ its functions would be pickled by value, and a guarded main part would train a second time.
        defined = runpy.run_path(str(path), run_name=_NAME)
    except SyntaxError as error:
        where, version = path if error.filename in (None, str(path)) else error.filename, platform.python_version()
        raise InputError(f"{where}, line {error.lineno}: {error.msg}; this is not Python {version}") from error
    except ModuleNotFoundError as error:
        hint = f"install it for this Python ({sys.executable}), or start with the Python that has it"
        raise InputError(f"{_place(path, error)}: there is no module {error.name!r}; {hint}") from error
    except SystemExit as error:
        raise InputError(
            f"{_place(path, error)}: it ends the process (exit code {error.code}) before its values could be read; "
            f'it must define {_listed(names)}, and do anything else under `if __name__ == "__main__":`'
        ) from error
    except Exception as error:
        said = shortened(str(error).strip().partition("\n")[0])
        raise InputError(f"{_place(path, error)}: {type(error).__name__}: {said}") from error
    finally:
        sys.path.pop(0)
    missing = [name for name in names if name not in defined]
    if missing:
        raise InputError(f"{path} must define {_listed(names)}; it lacks {', '.join(missing)}")
    return {name: defined[name] for name in names}


def _place(path: Path, error: BaseException) -> str:
    """Return the place of an error in the script: the last of its lines that were being run."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}, line {lines[-1]}" if lines else str(path)


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"
