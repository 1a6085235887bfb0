"""`python -m tatami.comm.runner script.py ...` (or `-m module ...`): one rank as a process of its own."""

import sys

from tatami.comm.program import run_program

if __name__ == "__main__":
    run_program(sys.argv[1:])
