"""`python -I guard.py command ...`: runs one rank's command, and says how it died if it did.

MPI's launchers kill all ranks as soon as one has died, and cannot tell afterwards which was the first. So `tatami run` puts
this small parent above each rank: it outlives the rank just long enough to say so. It also ends by a signal when the rank ended
with an exit code, because before MPI is up MPICH's launcher lets the other ranks wait forever otherwise.

(Ranks of MPICH on this machine alone need no guard: `tatami.comm.local` watches them itself.)

It is started by its path, and imports the standard library alone: it must cost nothing beside the rank itself.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import stat
import sys
import termios
import time
from types import FrameType

LAST_WORDS = "TATAMI_LAST_WORDS"
"""The variable with the directory in which a dying rank leaves its message for `tatami run`."""
WATCHED = "TATAMI_WATCHED"
"""The variable that is set where `tatami run` watches the ranks itself, so that the end of one is enough to end all."""
MARKS = "TATAMI_MPI_MARKS"
"""The variable with the number of a pipe in which a rank marks that it has begun MPI, and that it has left it."""
LEFT_EARLY = "ended with exit code 0 before it had left MPI (by os._exit?)"
_PR_SET_PDEATHSIG = 1
"""prctl(2): the signal a process gets when its parent dies."""
_PATIENCE_S = 2.0
"""For a launcher that does not read."""
_PASSING_ON_S = 0.1
_libc = ctypes.CDLL(None)
_RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")


def main() -> int:
    """Run the command; returns 0 when it ended well, and otherwise does not return."""
    command, parent = sys.argv[1:], os.getpid()
    marks, write_marks = os.pipe()
    os.set_inheritable(write_marks, True)
    end_with_parent()
    # A signal that comes while there is no handler yet waits for it.
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    rank_pid = os.fork()
    if rank_pid == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        end_with_parent()
        if os.getppid() == parent:
            os.environ[MARKS] = str(write_marks)
            os.execvp(command[0], command)
        os._exit(1)
    os.close(write_marks)
    asked_to_end = False

    def pass_on(number: int, _frame: FrameType | None) -> None:
        nonlocal asked_to_end
        asked_to_end = True
        os.kill(rank_pid, number)

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    code = os.waitstatus_to_exitcode(os.waitpid(rank_pid, 0)[1])
    if code == 0 and not _is_in_mpi(marks):
        return 0
    if not asked_to_end:
        rank = next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), "?")
        say_last(describe_end(rank, rank_pid, ended_by(code) if code else LEFT_EARLY))
    os.kill(os.getpid(), signal.SIGKILL)
    return 1


def end_with_parent() -> None:
    """From now on this process ends with the one that started it, however that one ends; where the system can do that."""
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def ended_by(code: int) -> str:
    """How a process ended, by its exit code, or the negative number of the signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    names = {each.value: each.name for each in signal.Signals}
    return f"was killed by signal {-code} ({names.get(-code, 'a signal without a name')})"


def describe_end(rank: object, pid: int, how: str) -> str:
    """The sentence about the rank that ended the job."""
    return f"tatami run: rank {rank} (pid {pid} on {socket.gethostname()}) {how}; the other ranks are stopped"


def mark(sign: bytes) -> None:
    """Tell this rank's guard, if it has one, that it has begun MPI (`+`) or left it (`-`)."""
    if MARKS in os.environ:
        try:
            os.write(int(os.environ[MARKS]), sign)
        except OSError:  # a program in between has closed the pipe
            return


def _is_in_mpi(marks: int) -> bool:
    os.set_blocking(marks, False)
    try:
        data = os.read(marks, 64)
    except BlockingIOError:  # a process that the rank left running has it open
        return False
    return data.count(b"+") > data.count(b"-")


def say_last(message: str) -> None:
    """Say on standard error why this rank ends the job, in a way that the end of the job cannot swallow.

    MPI's launchers drop what they have not yet read of a rank's output when a rank aborts. A file of `tatami run`, which prints
    it when all is over, is not dropped; it serves for the message. For what this rank has printed before, and where there is
    no such file (other machines, other launchers), the launcher gets the time to read.
    """
    directory = os.environ.get(LAST_WORDS)
    if directory is not None and os.path.isdir(directory):
        name = os.path.join(directory, f"{time.time_ns():020d}-{os.getpid()}")
        with open(name + ".part", "w", encoding="utf-8") as file:
            file.write(message + "\n")
        os.replace(name + ".part", name)
    else:
        print(message, file=sys.stderr, flush=True)
    _await_reader()


def _await_reader() -> None:
    """Return when the launcher has read this process's output, and has had a moment to pass it on."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while any(_unread(output) for output in (1, 2)) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    time.sleep(_PASSING_ON_S)


def _unread(output: int) -> bool:
    """Whether bytes wait in this pipe; False for anything other than a pipe."""
    try:
        if not stat.S_ISFIFO(os.fstat(output).st_mode):
            return False
        count = fcntl.ioctl(output, termios.FIONREAD, bytes(4))
    except OSError:
        return False
    return int.from_bytes(count, sys.byteorder) > 0


if __name__ == "__main__":
    sys.exit(main())
