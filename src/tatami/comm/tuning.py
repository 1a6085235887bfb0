"""`algorithm="auto"`: by the tuning table of this cluster where there is one, else by the cost model.

Tables are kept as files, `$XDG_CACHE_HOME/tatami/allreduce-<hosts and ranks>.json`. Rank 0 alone reads them and chooses; the
others are told, so that all run the same algorithm even where their caches differ.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from pathlib import Path

from tatami.cluster import Cluster, Processor
from tatami.collective import ALGORITHMS, Fingerprint, TuningTable, build, price
from tatami.comm.agreement import decided_on_root
from tatami.comm.base import AbstractCommunicator
from tatami.distribution import __version__
from tatami.errors import InputError, ScheduleError, warn
from tatami.outputs import write_text

CACHE_VARIABLE = "XDG_CACHE_HOME"
ACROSS = ("ring", "halving_doubling", "native")
"""What `hierarchical` is tried with between hosts."""
LEAST_BUCKET_BYTES, LARGEST_BUCKET_BYTES = 1 << 20, 64 << 20
"""Limits of tuned buckets: smaller ones cost more calls than they hide, larger ones leave no backward to hide behind."""

_tables: weakref.WeakKeyDictionary[AbstractCommunicator, TuningTable | None] = weakref.WeakKeyDictionary()


def candidates(comm: AbstractCommunicator, *, hosts: Sequence[str], fixed_order: bool = False) -> tuple[str, ...]:
    """The algorithms that this communicator can run, as the table calls them: `ring`, `hierarchical+native`."""
    names: list[str] = []
    for name in ALGORITHMS:
        forms = [f"{name}+{across}" for across in ACROSS] if name == "hierarchical" else [name]
        for form in forms:
            algorithm, across = split_name(form)
            try:
                schedule = build(
                    algorithm, ranks=comm.size, size=comm.size, hosts=hosts, across=across, fixed_order=fixed_order
                )
            except ScheduleError:
                continue
            if comm.has_windows or not (schedule.one_sided or schedule.shared):
                names.append(form)
    several = 1 < len(set(hosts)) < len(hosts)
    return tuple(name for name in names if several or not name.startswith("hierarchical"))


def split_name(name: str) -> tuple[str, str]:
    """(algorithm, the one across hosts) of `hierarchical+native`; rings where none is named."""
    algorithm, _, across = name.partition("+")
    return algorithm, across or "ring"


def choose(comm: AbstractCommunicator, *, size: int, size_bytes: int, hosts: Sequence[str], fixed_order: bool) -> str:
    """The name of the fastest algorithm, the same on all ranks. Collective.

    Args:
        comm: whose table is read.
        size: elements.
        size_bytes: of all of them.
        hosts: the host of each rank; other ones than the communicator's have no table.
        fixed_order: only what sums in the same order in every run.
    """
    if comm.size == 1 or size == 0:
        return "native" if not fixed_order else "ring"
    table = table_of(comm) if tuple(hosts) == comm.hosts else None

    def fastest() -> str:
        among = candidates(comm, hosts=hosts, fixed_order=fixed_order)
        chosen = table.choose(size_bytes, among=among) if table is not None else None
        return chosen or cheapest(among, size=size, size_bytes=size_bytes, hosts=hosts)

    return decided_on_root(comm, fastest)


def cheapest(among: Sequence[str], *, size: int, size_bytes: int, hosts: Sequence[str]) -> str:
    """By the cost model, over links as they are where nothing was measured.

    Inside one host no model is asked: loads and stores beat every message there is, at 1 KiB (1.5 us against 4) as at 64 MiB.
    """
    if "shared" in among:
        return "shared"
    cluster = Cluster(processors=tuple(Processor(name=f"rank{rank}", speed=1.0, host=host) for rank, host in enumerate(hosts)))
    element_bytes = max(1, size_bytes // size)

    def cost_s(name: str) -> float:
        algorithm, across = split_name(name)
        schedule = build(algorithm, ranks=len(hosts), size=size, hosts=hosts, across=across)
        return price(schedule, cluster, element_bytes=element_bytes).total_s

    return min(among, key=cost_s)


def table_of(comm: AbstractCommunicator) -> TuningTable | None:
    """The table of this cluster, on rank 0; None elsewhere, and where there is none. Collective when it is asked for first."""
    if comm not in _tables:
        now = fingerprint_of(comm)
        _tables[comm] = read_table(now) if comm.rank == 0 else None
    return _tables[comm]


def tuned_bucket_bytes(comm: AbstractCommunicator) -> int | None:
    """The size at which messages begin to use the links well, by the table of this cluster; None without one. Collective.

    Buckets of it are reduced as early as can be without wasting the links. The same on all ranks.
    """
    table = table_of(comm)
    size_bytes = decided_on_root(comm, lambda: table.efficient_bytes() if table is not None else None)
    return None if size_bytes is None else min(max(size_bytes, LEAST_BUCKET_BYTES), LARGEST_BUCKET_BYTES)


def keep_table(comm: AbstractCommunicator, table: TuningTable) -> Path:
    """Use `table` from now on, and on rank 0 write it for later runs, over an older one."""
    path = table_path(table.fingerprint)
    if comm.rank == 0:
        write_text(path, table.to_json(), force=True)
    _tables[comm] = table if comm.rank == 0 else None
    return path


def read_table(now: Fingerprint) -> TuningTable | None:
    """The table of the cluster `now`; one that is stale or damaged is ignored, with a warning that says why."""
    path = table_path(now)
    try:
        table = TuningTable.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, InputError) as error:
        warn(f"the all-reduce tuning table {path} is ignored: {error}. {_REMEDY}")
        return None
    stale = table.fingerprint.differences(now)
    if stale:
        warn(f"the all-reduce tuning table {path} is stale and ignored ({'; '.join(stale)}). {_REMEDY}")
        return None
    return table


_REMEDY = "Measure it again with: tatami bench allreduce --tune"


def cache_directory() -> Path:
    """Where tables are kept: `$XDG_CACHE_HOME/tatami`, or `~/.cache/tatami`."""
    base = os.environ.get(CACHE_VARIABLE, "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "tatami"


def table_path(fingerprint: Fingerprint) -> Path:
    return cache_directory() / f"allreduce-{fingerprint.key}.json"


def fingerprint_of(comm: AbstractCommunicator) -> Fingerprint:
    """What this communicator runs on. Collective."""
    places = comm.allgather_object((comm.hosts[comm.rank], len(os.sched_getaffinity(0)), cpu_model()))
    hosts = tuple(dict.fromkeys(comm.hosts))
    by_host = {host: (cores, cpu) for host, cores, cpu in reversed(places)}
    return Fingerprint(
        hosts=hosts,
        ranks_per_host=tuple(comm.hosts.count(host) for host in hosts),
        cores=tuple(by_host[host][0] for host in hosts),
        cpus=tuple(by_host[host][1] for host in hosts),
        library=comm.library,
        tatami=__version__,
    )


def cpu_model() -> str:
    """As the kernel names it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), os.uname().machine)
    except OSError:
        return os.uname().machine
