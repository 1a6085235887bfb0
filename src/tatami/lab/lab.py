"""A cluster of unequal hosts on this one machine, for as long as a `with` lasts."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Self, final

from tatami.cluster import Cluster, Link, check_speeds
from tatami.comm.launch import without_leftovers
from tatami.comm.signals import ending_as_exception, undisturbed
from tatami.errors import InputError, LabError, warn
from tatami.lab.events import LabEvent
from tatami.lab.groups import FREE, AbstractGroups, find_groups
from tatami.lab.lab_state import LabState, new_state, take_away, write_pace
from tatami.lab.launched_job import (
    FIRST,
    JOB_VARIABLE,
    RANK_MODULE,
    LabJob,
    environment_of,
    mpi_command,
    spawn_on,
    write_launch_script,
)
from tatami.lab.needs import require_lab
from tatami.lab.network import Network, kernel_delays
from tatami.lab.plan import BALANCE, LARGEST_SHARE, NATIVE_LATENCY_S, SWITCH, Host, LabPlan, plan_lab, switch_address
from tatami.units import format_duration, format_size, parse_bandwidth, parse_size


@final
class Lab:
    """Hosts with names, addresses, links and speeds of their own; everything is taken away at the end, also after an error.

        with Lab(cluster) as lab:
            lab.run(["python", "train.py"])

    Args:
        cluster: its processors are the ranks; those of one host share its name, its link and its memory.
        cores: of this machine, that the lab may use; None for all that this process may use.
        base_memory: limit each host's memory to that of its processors (`Processor.memory`), which is for networks, and so many
            bytes more for each, or a text as "400 MiB", for Python, torch and MPI. The kernel ends a process that wants more.
            None: no host has a limit.
        paced: hosts compute at this machine's full speed and then wait until they would be done, by a model
            (`tatami.lab.pacing`), in place of computing with a part of a core. Speeds must be in flop/s, this machine faster
            than all hosts together. Ranks are Python scripts that use torch.
        dilation: so many times as long everything takes in a paced lab, computing and messages between hosts: for hosts and
            links that are faster than this machine.
        balance: flop that a paced host could do while it moves a byte.

    Raises:
        ClusterError: invalid host names; with `base_memory`, processors without memory; paced, relative speeds.
        InputError: `cores` is not a number > 0, or more than there are; `base_memory` is no size.
        LabError: (on entering) this machine cannot be a lab; says what is missing and what works instead.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        cores: float | None = None,
        base_memory: int | str | None = None,
        paced: bool = False,
        dilation: float = 1.0,
        balance: float = BALANCE,
    ) -> None:
        available = len(os.sched_getaffinity(0))
        if cores is not None and cores > available:
            raise InputError(f"a lab may use at most the {available} cores that this process has, not {cores:g}")
        self.plan: LabPlan = plan_lab(
            cluster,
            cores=float(available) if cores is None else cores,
            base_bytes=None if base_memory is None else parse_size(base_memory),
            paced=paced,
            dilation=dilation,
            balance=balance,
        )
        self._speeds = [processor.speed for processor in self.plan.cluster.processors]
        self._dead: set[str] = set()
        self._cut: set[str] = set()
        self._num_jobs = 0

    def __enter__(self) -> Self:
        require_lab()
        with ExitStack() as ending:
            ending.enter_context(ending_as_exception())
            undo = ending.enter_context(ExitStack())
            undo.enter_context(without_leftovers())
            with undisturbed():
                self._state = new_state([host.name for host in self.plan.hosts])
                undo.callback(_take_away_undisturbed, self._state)
            self._build()
            self._undo = undo.pop_all()
            self._ending = ending.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._ending, undisturbed():
            self._undo.close()

    # -- processes --------------------------------------------------------------------------------------------------------

    def start(
        self, command: Sequence[str], *, environment: Mapping[str, str] | None = None, stdout: IO[bytes] | int | None = None
    ) -> LabJob:
        """Start `command` on every processor, as the ranks of one MPI job.

        Args:
            command: a program and its arguments; `train.py ...` and `-m module ...` run under this Python.
            environment: added to this process's own.
            stdout: where the ranks' output goes, as for `subprocess.Popen`.

        Raises:
            InputError: no command, or no such program.
            LabError: this mpiexec is not MPICH's; or hosts are paced, and the command is no Python script.
            MissingExtraError: there is no mpiexec.
        """
        hosts = [processor.host for processor in self.plan.cluster.processors]
        words = mpi_command(command, hosts=hosts, folder=Path(self._state.folder))
        if self.plan.paced and RANK_MODULE not in words:
            raise LabError(f"a paced lab waits between torch's operations, and {command[0]} is no Python script")
        # A session of its own: Ctrl-C comes to us alone, and we end the job.
        self._num_jobs += 1
        mark = {JOB_VARIABLE: f"{self.name}/{self._num_jobs}"}
        environment = {**(environment or {}), **mark}
        switch = self._state.host_file(SWITCH)
        process = spawn_on(switch, FREE, words, environment=environment, stdout=stdout, own_session=True)
        return LabJob(process, is_deserted=partial(self._is_deserted, f"{JOB_VARIABLE}={mark[JOB_VARIABLE]}".encode()))

    def run(
        self,
        command: Sequence[str],
        *,
        events: Sequence[LabEvent] = (),
        environment: Mapping[str, str] | None = None,
        stdout: IO[bytes] | int | None = None,
        timeout_s: float | None = None,
        said: Callable[[LabEvent], None] = lambda _: None,
    ) -> int:
        """Run `command` on every processor and return its exit code; see `start` and `LabJob.poll`.

        Args:
            command: a program and its arguments.
            environment: added to this process's own.
            stdout: where the ranks' output goes, as for `subprocess.Popen`.
            events: what happens to the lab meanwhile; those that are later than its end do not happen.
            timeout_s: after which it is stopped; None to wait for its end.
            said: called with each event as it happens.

        Raises:
            InputError: also where an event names an unknown host or an invalid speed; nothing is started then.
            LabError: also where it did not end within `timeout_s`.
        """
        for event in events:
            self._check(event)
        job = self.start(command, environment=environment, stdout=stdout)
        start_s = time.monotonic()
        try:
            for event in sorted(events, key=lambda event: event.at_s):
                if (timeout_s is not None and event.at_s > timeout_s) or _ends_before(job, start_s + event.at_s):
                    break
                said(event)
                self.happen(event)
            return job.wait(timeout_s=None if timeout_s is None else max(0.0, start_s + timeout_s - time.monotonic()))
        except BaseException:
            job.stop()
            raise

    def spawn(
        self,
        name: str,
        command: Sequence[str],
        *,
        limited: bool = True,
        environment: Mapping[str, str] | None = None,
        stdout: IO[bytes] | int | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start one process on one host, without MPI.

        Args:
            name: a processor, or a host (then its first processor).
            command: a program and its arguments.
            limited: under the processor's quota; else at the machine's full speed.
            environment: added to this process's own.
            stdout: where its output goes, as for `subprocess.Popen`.

        Raises:
            InputError: there is no such processor or host.
            LabError: it is to be limited, and hosts are paced: only ranks are (`start`, `run`).
        """
        rank = self._ranks(name)[0]
        if self.plan.paced and limited:
            raise LabError(
                f"a paced lab has no quotas, and {command[0]} would run at full speed: start it as ranks, or limited=False"
            )
        file = self._state.host_file(self.plan.cluster.processors[rank].host)
        return spawn_on(file, str(rank) if limited else FREE, command, environment=environment, stdout=stdout)

    # -- what happens to hosts --------------------------------------------------------------------------------------------

    def set_speed(self, name: str, speed: float) -> None:
        """Give a processor, or each processor of a host, another `speed`, in the cluster's own units.

        Raises:
            InputError: no such name, no finite number > 0, or more than this machine has.
        """
        self._check(LabEvent(at_s=0.0, verb="speed", host=name, value=speed))
        for rank in self._ranks(name):
            self._speeds[rank] = speed / self.plan.dilation
            if self.plan.paced:
                write_pace(Path(self._state.folder), rank, flop_per_s=self._speeds[rank], balance=self.plan.balance)
            else:
                host = self.plan.cluster.processors[rank].host
                self._groups.set_quota(host, str(rank), cores=speed * self.plan.scale)

    def set_rate(self, name: str, rate: float | str) -> None:
        """Give all links of a host another `rate`, in bytes/s or as "100 Mbit/s".

        Raises:
            InputError: no such host, or no rate > 0.
        """
        value = parse_bandwidth(rate)
        self._check(LabEvent(at_s=0.0, verb="rate", host=name, value=value))
        network, exceptions = self._links(self._host(name), rate=value / self.plan.dilation)
        for wire in self._network.wires(self._host(name), network=network, exceptions=exceptions):
            self._network.change_rate(wire)

    def kill(self, name: str) -> None:
        """A host dies: its link goes down, so that no other host is notified, and all its processes end at once. It does not
        come back.

        Raises:
            InputError: no such host.
        """
        host = self._host(name)
        self._network.set_link(host, up=False)
        self._groups.kill(name)
        self._dead.add(name)

    def cut(self, name: str) -> None:
        """Cut a host off: its processes go on, but nothing comes through.

        Raises:
            InputError: no such host.
        """
        self._network.set_link(self._host(name), up=False)
        self._cut.add(name)

    def mend(self, name: str) -> None:
        """Undo `cut`.

        Raises:
            InputError: no such host, or a dead one.
        """
        if name in self._dead:
            raise InputError(f"host {name} was killed; its link cannot come back without it")
        self._network.set_link(self._host(name), up=True)
        self._cut.discard(name)

    def happen(self, event: LabEvent) -> None:
        """Let `event` happen now; its time does not matter.

        Raises:
            InputError: it cannot.
        """
        match event.verb:
            case "kill":
                self.kill(event.host)
            case "cut":
                self.cut(event.host)
            case "mend":
                self.mend(event.host)
            case "speed":
                self.set_speed(event.host, event.value)
            case _:
                self.set_rate(event.host, event.value)

    def starved(self) -> dict[str, str]:
        """The hosts on which the kernel ended processes that wanted more memory than there was, and what happened there."""
        found = {}
        for host in self.plan.hosts:
            if host.memory_bytes is not None and (count := self._groups.num_starved(host.name)):
                found[host.name] = (
                    f"the kernel ended {count} process{'es' if count > 1 else ''} on {host.name}: more was wanted than the "
                    f"{format_size(host.memory_bytes, digits=3)} of memory that the host has"
                )
        return found

    @property
    def name(self) -> str:
        """How the lab is called in names of namespaces and control groups, and by `tatami lab shell`."""
        return self._state.name

    # -- building ---------------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        self._groups: AbstractGroups = find_groups(self.name, mounts=Path("/proc/mounts").read_text(encoding="utf-8"))
        self._groups.build_lab()
        self._groups.build_host(SWITCH, leaves=[FREE])
        builder = Network(self.name, delays=False)
        builder.build_switch()
        delays = kernel_delays(builder.namespace(SWITCH))
        self._network = Network(self.name, delays=delays)
        for host in self.plan.hosts:
            self._build_host(host)
        self._write_files()
        if not delays and (latency_s := self.plan.longest_latency_s()):
            warn(
                "latency is not emulated: this kernel has no netem. A message between hosts takes what this machine needs "
                f"({format_duration(NATIVE_LATENCY_S)} or less), not {format_duration(latency_s)}; rates are emulated"
            )

    def _build_host(self, host: Host) -> None:
        self._groups.build_host(host.name, leaves=[FREE, *map(str, host.processors)])
        if host.memory_bytes is not None:
            self._groups.limit_memory(host.name, limit_bytes=host.memory_bytes)
        for rank in host.processors:
            if self.plan.paced:
                write_pace(Path(self._state.folder), rank, flop_per_s=self._speeds[rank], balance=self.plan.balance)
            else:
                self._groups.set_quota(host.name, str(rank), cores=self.plan.quotas[rank])
        self._network.build_host(host)
        network, exceptions = self._links(host, rate=None)
        for wire in self._network.wires(host, network=network, exceptions=exceptions):
            self._network.shape(wire)

    def _write_files(self) -> None:
        """Write the files that `enter.py` reads, once for every process."""
        folder = Path(self._state.folder)
        (folder / "sys").mkdir()
        addresses = {SWITCH: switch_address(), **{host.name: host.address for host in self.plan.hosts}}
        lines = ["127.0.0.1\tlocalhost", *(f"{address}\t{name}" for name, address in addresses.items())]
        (folder / "hosts").write_text("\n".join(lines) + "\n", encoding="ascii")
        for name in addresses:
            leaves = [FREE] if name == SWITCH else [*map(str, self.plan.by_name[name].processors), FREE]
            host = {
                "name": name,
                "namespace": f"/run/netns/{self._network.namespace(name)}",
                "hosts_file": str(folder / "hosts"),
                "sysfs": str(folder / "sys"),
                "groups": {leaf: self._groups.files(name, leaf) for leaf in leaves}
                | {FIRST: self._groups.files(name, leaves[0])},
            }
            Path(self._state.host_file(name)).write_text(json.dumps(host), encoding="utf-8")
        ranks = [self._groups.files(each.host, str(rank)) for rank, each in enumerate(self.plan.cluster.processors)]
        (folder / "ranks.json").write_text(json.dumps(ranks), encoding="utf-8")
        write_launch_script(folder)

    def _links(self, host: Host, *, rate: float | None) -> tuple[Link, dict[int, Link]]:
        """A host's link to the network, and its other links by the other host's index; all of the given rate, if any."""
        network = self.plan.cluster.link_of(host.name)
        exceptions = {self.plan.by_name[name].index: link for name, link in self.plan.exceptions(host).items()}
        if rate is None:
            return network, exceptions
        changed = {index: replace(link, bandwidth_bytes_per_s=rate) for index, link in exceptions.items()}
        return replace(network, bandwidth_bytes_per_s=rate), changed

    # -- names ------------------------------------------------------------------------------------------------------------

    def _is_deserted(self, mark: bytes) -> bool:
        """Whether hosts are lost, and on no other one is a process with `mark` in its environment."""
        lost = self._dead | self._cut
        return bool(lost) and not any(
            mark in environment_of(pid).split(b"\0")
            for host in self.plan.hosts
            if host.name not in lost
            for pid in self._groups.processes(host.name)
        )

    def _host(self, name: str) -> Host:
        if name not in self.plan.by_name:
            raise InputError(f"there is no host {name!r} in this lab; its hosts are {', '.join(self.plan.by_name)}")
        return self.plan.by_name[name]

    def _ranks(self, name: str) -> tuple[int, ...]:
        """The ranks of a processor, or of all processors of a host."""
        if name in self.plan.by_name:
            return self.plan.by_name[name].processors
        if name in self.plan.cluster.rank_of:
            return (self.plan.cluster.rank_of[name],)
        processors = ", ".join(self.plan.cluster.rank_of)
        raise InputError(
            f"there is no host or processor {name!r} in this lab; its hosts are {', '.join(self.plan.by_name)}, "
            f"its processors {processors}"
        )

    def _check(self, event: LabEvent) -> None:
        """Whether an event can happen.

        Raises:
            InputError: it cannot.
        """
        if event.verb != "speed":
            self._host(event.host)
            if event.verb == "rate" and not event.value > 0:
                raise InputError(f"the rate of {event.host} must be > 0, not {event.value}; to have none, cut it")
            return
        ranks = self._ranks(event.host)
        check_speeds([event.value])
        if self.plan.paced:
            return
        if event.value * self.plan.scale > LARGEST_SHARE * (1 + 1e-9):
            raise InputError(
                f"speed {event.value:g} for {event.host} would be {event.value * self.plan.scale:.3g} of a core, and a "
                f"processor is one rank on one core: at most {LARGEST_SHARE / self.plan.scale:.3g} in this lab"
            )
        others = sum(speed for rank, speed in enumerate(self._speeds) if rank not in ranks)
        total = (others + event.value * len(ranks)) * self.plan.scale
        if total > self.plan.cores:
            raise InputError(
                f"speed {event.value:g} for {event.host} would make all processors together need {total:.3g} cores of "
                f"{self.plan.cores:g}; start the lab with fewer processors, or slow others down first"
            )


def _take_away_undisturbed(state: LabState) -> None:
    with undisturbed():
        take_away(state)


def _ends_before(job: LabJob, deadline_s: float) -> bool:
    """Whether the job ends before that time of the monotonic clock; waits until then, at most."""
    try:
        job.wait(timeout_s=max(0.0, deadline_s - time.monotonic()))
    except LabError:
        return False
    return True
