"""What is written down about a lab before it is built, so that it can be taken away also when its process was killed."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tatami.errors import InputError, LabError
from tatami.lab.groups import find_groups
from tatami.lab.network import Network
from tatami.lab.plan import SWITCH

STATES = Path("/run/tatami-lab")
_START_TIME_FIELD = 19
"""Index of the field in /proc/PID/stat, counted after the program's name."""


@dataclass(frozen=True, kw_only=True)
class LabState:
    """A lab as it is known to other processes.

    Attributes:
        name: of the lab; what the names of all that belongs to it begin with.
        hosts: their names, the switch too.
        folder: the lab's own files.
        owner: the number of the process that built it.
        owner_started: when that process was started, in the kernel's ticks: numbers of processes are used again.
    """

    name: str
    hosts: tuple[str, ...]
    folder: str
    owner: int
    owner_started: int

    @property
    def is_running(self) -> bool:
        """Whether the process that built it is alive."""
        return _start_time(self.owner) == self.owner_started

    def host_file(self, host: str) -> str:
        """What `enter.py` reads to become a process of this host."""
        return os.path.join(self.folder, f"host-{host}.json")


def pace_file(folder: Path, rank: int) -> Path:
    """Where a paced rank reads its host's flop/s, and flop for a byte moved; there is none where hosts are not paced."""
    return folder / f"pace-{rank}"


def write_pace(folder: Path, rank: int, *, flop_per_s: float, balance: float) -> None:
    """Set the flop/s of a rank's host, also while the rank runs."""
    file = pace_file(folder, rank)
    new = file.with_suffix(".new")
    new.write_text(f"{flop_per_s!r} {balance!r}", encoding="ascii")
    new.replace(file)


def new_state(hosts: Sequence[str]) -> LabState:
    """Choose a name that no other lab has, and write the lab down.

    Raises:
        LabError: the state cannot be written.
    """
    name = f"tatami-{secrets.token_hex(3)}"
    started = _start_time(os.getpid())
    assert started is not None
    try:
        STATES.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(prefix=f"{name}-")
        state = LabState(name=name, hosts=(*hosts, SWITCH), folder=folder, owner=os.getpid(), owner_started=started)
        with (STATES / f"{name}.json").open("x", encoding="utf-8") as file:
            json.dump(asdict(state), file)
    except OSError as error:
        raise LabError(f"cannot write down the new lab in {error.filename}: {error.strerror}") from None
    return state


def known_labs() -> list[LabState]:
    """All labs that are written down, running or left over."""
    found = []
    for path in sorted(STATES.glob("*.json")):
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            found.append(LabState(**{**values, "hosts": tuple(values["hosts"])}))
        except FileNotFoundError:  # it was taken away meanwhile
            continue
        except (ValueError, TypeError, KeyError) as error:
            raise LabError(f"{path} does not describe a lab ({error}); remove the file by hand") from None
    return found


def running_lab(host: str, *, name: str | None = None) -> LabState:
    """The running lab that has a host of this name.

    Args:
        host: its name.
        name: of the lab, where several have one.

    Raises:
        InputError: there is none, or there are several and `name` was not given.
    """
    running = [lab for lab in known_labs() if lab.is_running and name in (None, lab.name)]
    found = [lab for lab in running if host in lab.hosts]
    if len(found) == 1:
        return found[0]
    if found:
        raise InputError(f"several labs have a host {host!r}; say which: --lab {' or --lab '.join(lab.name for lab in found)}")
    if not running:
        raise InputError(
            f"no lab{'' if name is None else f' {name}'} is running; start one in another terminal (tatami lab run "
            f"cluster.toml -- ...), or one just for this shell: tatami lab shell {host} --cluster cluster.toml"
        )
    hosts = "; ".join(f"{lab.name}: {', '.join(lab.hosts)}" for lab in running)
    raise InputError(f"no running lab has a host {host!r}; there are {hosts}")


def take_away(state: LabState) -> None:
    """Undo all that belongs to a lab, also one that was built in part; what is already gone is not an error.

    Raises:
        LabError: something stayed; all else is gone nevertheless, and the lab stays written down.
    """
    problems = []
    try:
        find_groups(state.name, mounts=Path("/proc/mounts").read_text(encoding="utf-8")).remove()
    except LabError as error:
        problems.append(str(error))
    network = Network(state.name, delays=False)
    for host in state.hosts:
        network.remove(host)
    if left := [host for host in state.hosts if Path("/run/netns", network.namespace(host)).exists()]:
        problems.append(f"the network namespaces of {', '.join(left)} are still there")
    shutil.rmtree(state.folder, ignore_errors=True)
    if problems:
        raise LabError(f"{state.name} could not be taken away whole: " + "; ".join(problems))
    (STATES / f"{state.name}.json").unlink(missing_ok=True)


def _start_time(pid: int) -> int | None:
    """When the process was started; None where it does not run, also where its parent has not asked for its end yet."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[_START_TIME_FIELD])
