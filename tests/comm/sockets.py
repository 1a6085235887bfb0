"""The sockets by which other machines can reach a process and its descendants; `python sockets.py FILE PID`, as ranks."""

import ipaddress
import json
import os
import sys
from itertools import chain
from pathlib import Path

_LISTENING = "0A"
_TABLES = ("tcp", "tcp6", "udp", "udp6")


def exposed(pids: list[int]) -> list[str]:
    """`python (4711): tcp 0.0.0.0:5001` of each socket of these processes that listens beyond the loopback interface."""
    owners: dict[str, int] = {}
    for pid in pids:
        try:
            for link in Path(f"/proc/{pid}/fd").iterdir():
                owners.setdefault(os.readlink(link), pid)
        except OSError:  # it has ended
            continue
    found = []
    for table in _TABLES:
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            owner = owners.get(f"socket:[{fields[9]}]")
            if owner is None or (table.startswith("tcp") and fields[3] != _LISTENING):
                continue
            address, _, port = fields[1].partition(":")
            if not (place := _address(address)).is_loopback:
                name = Path(f"/proc/{owner}/comm").read_text().strip()
                found.append(f"{name} ({owner}): {table} {place}:{int(port, 16)}")
    return found


def family_of(ancestor: int) -> list[int]:
    """A process and all that descend from it."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    family, grown = {ancestor}, True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in family} - family
        family |= more
        grown = bool(more)
    return sorted(family)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    words = bytes.fromhex(text)
    packed = b"".join(words[start : start + 4][:: -1 if sys.byteorder == "little" else 1] for start in range(0, len(words), 4))
    if len(packed) == 4:
        return ipaddress.IPv4Address(packed)
    address = ipaddress.IPv6Address(packed)
    return address.ipv4_mapped or address


def main() -> None:
    """As a rank's script: move bytes in all ways, then rank 0 writes down what the whole job listens on."""
    import torch

    import tatami
    from tatami.comm import AllReduce, AllReduceSpec

    comm = tatami.init()
    for algorithm in ("ring", "shared", "torus_put", "native") if comm.has_windows else ("ring", "native"):
        AllReduce(comm, AllReduceSpec(size=1 << 18, algorithm=algorithm)).run()
    comm.allreduce(torch.zeros(1 << 18))
    comm.barrier()
    pids = [os.getpid()] if sys.argv[2] == "ranks" else family_of(int(sys.argv[2]))
    open_by_rank = comm.allgather_object(exposed(pids))
    if comm.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps({"exposed": sorted({*chain(*open_by_rank)}), "ranks": comm.size}))
    comm.barrier()


if __name__ == "__main__":
    main()
