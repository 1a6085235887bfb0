"""The Python program of one rank, whose failure ends all ranks.

`tatami run` starts Python scripts by this module. It covers what the hooks of `tatami.init` cannot: an exception before
`init`, and an exit with a code other than 0. After either, the other ranks would wait for this one until their timeout.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from types import TracebackType

from tatami.comm.session import stop_all_ranks, stop_on_failure, this_rank
from tatami.errors import InputError


def run_program(words: Sequence[str]) -> None:
    """Run `script.py ...` or `-m module ...` as Python itself would.

    Raises:
        InputError: there are no such words.
        SystemExit: the program ended itself, well.
    """
    if not words or (words[0] == "-m" and len(words) == 1):
        raise InputError("nothing to run: python -m tatami.comm.runner script.py ..., or -m module ...")
    try:
        if words[0] == "-m":
            sys.argv = [*words[1:]]
            sys.path[0] = os.getcwd()
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [*words]
            sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as request:
        # Exit code 0 ends this rank alone; any other ends the job, as a failure does.
        if request.code is None or request.code == 0:
            raise request
        code = request.code if isinstance(request.code, int) else 1
        said = "" if isinstance(request.code, int) else f"{request.code}\n"
        stop_all_ranks(f"{said}{this_rank()} ended with exit code {code}; all ranks are stopped", exit_code=code)
    except BaseException as error:
        stop_on_failure(error, trace=_without_runner(error.__traceback__))


def _without_runner(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that belongs to the script."""
    rest = trace
    while rest is not None and rest.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>", runpy.__file__):
        rest = rest.tb_next
    return rest if rest is not None else trace
