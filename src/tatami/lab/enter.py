"""Become a process of a lab's host: `python -I -S enter.py HOST-FILE GROUP COMMAND...` and two forms that MPI's launcher calls.

A host is a network namespace, a name, an /etc/hosts of its own, and control groups. This program steps into all of them and
then turns into the command: no shell in between reads what a user wrote. It is started by its path, once for every process
of a lab, and imports neither tatami nor anything slow.
"""

import ctypes
import json
import os
import shlex
import socket
import sys
from typing import Any

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
MS_BIND, MS_REC, MS_SLAVE = 4096, 16384, 1 << 19

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """`enter.py --launch DIR [OPTIONS] HOST WORDS...`: what Hydra calls in place of ssh, its words meant for a shell.

    `enter.py --rank DIR COMMAND...`: a rank, on its host already, joins the groups of its processor.
    `enter.py HOST-FILE GROUP COMMAND...`: any other process.
    """
    words = sys.argv[1:]
    if words[0] == "--launch":
        directory, rest = words[1], words[2:]
        while rest[0].startswith("-"):  # ssh's own: -x, -q
            rest = rest[1:]
        step_into(read(directory, f"host-{rest[0]}.json"), group="free")
        become(shlex.split(" ".join(rest[1:])))
    elif words[0] == "--rank":
        join(read(words[1], "ranks.json")[int(os.environ["PMI_RANK"])])
        become(words[2:])
    else:
        step_into(read(words[0]), group=words[1])
        become(words[2:])


def read(*parts: str) -> Any:
    """A file of the lab."""
    with open(os.path.join(*parts), encoding="utf-8") as file:
        return json.load(file)


def join(group_files: list[str]) -> None:
    """Move this process into control groups, each given by the file that takes process ids."""
    for path in group_files:
        with open(path, "w", encoding="ascii") as file:
            file.write(str(os.getpid()))


def step_into(host: dict[str, Any], *, group: str) -> None:
    """Make this process one of the host's: its groups, network, mounts and name."""
    join(host["groups"][group])
    namespace = os.open(host["namespace"], os.O_RDONLY)
    _check(_libc.setns(namespace, CLONE_NEWNET), f"enter {host['namespace']}")
    os.close(namespace)
    _check(_libc.unshare(CLONE_NEWNS | CLONE_NEWUTS), "leave the machine's mounts and name")
    _mount(b"", b"/", None, MS_REC | MS_SLAVE)
    # /sys must list the interfaces of this namespace, for UCX chooses among them, and keep the control groups below it.
    own = os.fsencode(host["sysfs"])
    _mount(b"tatami-lab", own, b"sysfs", 0)
    for part in (b"/class/net", b"/devices/virtual/net"):
        _mount(own + part, b"/sys" + part, None, MS_BIND)
    _mount(os.fsencode(host["hosts_file"]), b"/etc/hosts", None, MS_BIND)
    socket.sethostname(host["name"])


def become(command: list[str]) -> None:
    """Turn into the command; this program ends here."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"tatami lab: cannot run {command[0]!r}: {error.strerror}")


def _mount(source: bytes, target: bytes, kind: "bytes | None", flags: int) -> None:
    _check(_libc.mount(source, target, kind, flags, None), f"mount {os.fsdecode(target)}")


def _check(result: int, what: str) -> None:
    if result != 0:
        sys.exit(f"tatami lab: cannot {what}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main()
