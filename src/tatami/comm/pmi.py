"""What MPICH's ranks ask of the program that started them: the server's side of PMI 1, the process management interface.

Ranks put their addresses into a store, meet, read the others' addresses, and say when they have left MPI. It is a conversation
in lines, each of a command and its values: `cmd=put kvsname=job key=P1-businesscard-0 value=0A3F...`. This is what is said and
when, without the sockets it goes over; `tatami.comm.local` has those.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import final

_MISSING = "key_not_found"


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A line for one rank."""

    rank: int
    line: str


@final
class PmiServer:
    """The store of one job on one machine, and how far each of its `size` ranks has come.

    Attributes:
        joined: ranks that have begun MPI.
        left: ranks that have ended MPI.
        aborted: the exit code with which a rank asked for the end of all, by rank.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.joined: set[int] = set()
        self.left: set[int] = set()
        self.aborted: dict[int, int] = {}
        # MPI names its files in shared memory after the store: no other job of this machine may have the same.
        self._name = f"tatami_{secrets.token_hex(8)}"
        self._waiting: set[int] = set()
        # All ranks are on one machine: so MPI uses the memory that they share.
        self._store = {"PMI_process_mapping": f"(vector,(0,1,{size}))"}

    def handle(self, rank: int, line: str) -> list[Reply]:
        """Answer one line of a rank; it may be what other ranks have waited for."""
        values = dict(word.partition("=")[::2] for word in line.split())
        match values.get("cmd", ""):
            case "init":
                self.joined.add(rank)
                reply = "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"
            case "get_maxes":
                reply = "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024 rc=0"
            case "get_appnum":
                reply = "cmd=appnum appnum=0 rc=0"
            case "get_my_kvsname":
                reply = f"cmd=my_kvsname kvsname={self._name} rc=0"
            case "get_universe_size":
                reply = f"cmd=universe_size size={self.size} rc=0"
            case "put":
                self._store[values["key"]] = values["value"]
                reply = "cmd=put_result rc=0 msg=success"
            case "get":
                value = self._store.get(values["key"])
                reply = (
                    f"cmd=get_result rc=-1 msg={_MISSING} value=unknown"
                    if value is None
                    else f"cmd=get_result rc=0 msg=success value={value}"
                )
            case "barrier_in":
                return self._meet(rank)
            case "finalize":
                self.left.add(rank)
                reply = "cmd=finalize_ack rc=0"
            case "abort":
                self.aborted[rank] = int(values.get("exitcode", 1))
                return []
            case name:
                # Names that are published and ranks that start more ranks: mpiexec has both, one machine's ranks do without.
                what = name.removesuffix("_name") if name else line.partition("=")[2].strip()
                reply = f"cmd={what}_result rc=-1 msg=not_supported info=not_supported"
        return [Reply(rank=rank, line=reply)]

    def _meet(self, rank: int) -> list[Reply]:
        self._waiting.add(rank)
        if len(self._waiting) < self.size:
            return []
        self._waiting.clear()
        return [Reply(rank=each, line="cmd=barrier_out rc=0") for each in range(self.size)]
