"""`tatami probe`: measure machines and links."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tatami.cli.options import DEVICE_HELP, Hosts, Ranks, check_device, epilog
from tatami.cli.script import read_script
from tatami.cli.terminal import show, show_json
from tatami.cluster import Cluster, SpeedTable, write_cluster
from tatami.errors import InputError
from tatami.outputs import check_output
from tatami.report.tables import Table, table_of
from tatami.units import format_bandwidth, format_duration, format_flop, format_size, format_speed
from tatami.workload import net_workload

if TYPE_CHECKING:
    from tatami.comm import AbstractCommunicator

EPILOG = epilog(
    "tatami probe -n 4 -o cluster.toml",
    "tatami probe -n 8 --hosts node1:4,node2:4 --net 203-800-26 -o cluster.toml",
    "tatami probe -n 4 --model net.py --samples 64 -o cluster.toml",
    "Then: tatami plan cluster.toml, and tatami train --cluster cluster.toml",
)
OF_A_MODEL = "tatami.plan(network, cluster=..., batch_size=..., sample=...) and tatami.tile(speeds=...), in Python"
_STRAYED = 0.5
"""Spread of a rank's timings, as a fraction of its speed, above which `probe` warns."""


def probe(
    *,
    ranks: Ranks = None,
    hosts: Hosts = None,
    net: Annotated[str, typer.Option(metavar="SIZES", help="Layer sizes of the network to time.")] = "203-80-26",
    model: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Python file with build_model() and sample, to time instead of --net."),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, metavar="N", help="Global batch size.")] = 1024,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help=DEVICE_HELP)] = "cpu",
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Cluster file to write.")] = None,
    backend: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Backend: mpi, tcp, threads or single. Default: the launcher's, otherwise mpi."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON record.")] = False,
) -> None:
    """Measure every rank's speed on real work, and the links between the hosts.

    Speeds are measured by local computing, repeatedly and on all ranks at once; so is the cost of a message for the rank that
    sends or receives it (CPU time over its share of a core). Links are measured one at a time: the latency by round trips of
    small messages, the bandwidth by large ones both ways at once, as in a sum of gradients.
    """
    from tatami.cli.ranks import num_started, on_ranks
    from tatami.model.cluster_probe import probe as measure
    from tatami.model.cluster_probe import probe_network as measure_for

    check_device(device, hosts=hosts)
    workload = net_workload(net, samples=samples)
    started = num_started()
    if output is not None and started is None:
        check_output(output, force=force)

    def body(comm: AbstractCommunicator) -> None:
        if comm.rank == 0 and output is not None:
            check_output(output, force=force)
        if model is None:
            cluster = measure(workload, comm, net=net, device=device)
        else:
            network, sample = read_model(model)
            cluster = measure_for(network, comm, sample=sample, batch_size=samples, device=device)
        if comm.rank == 0:
            following = f"tatami plan {output} --net {net} --samples {samples}" if model is None else OF_A_MODEL
            _tell(cluster, following=following, output=output, force=force, as_json=as_json)

    on_ranks(body, ranks=ranks or started or 2, backend=backend, hosts=hosts)


def _tell(cluster: Cluster, *, following: str, output: Path | None, force: bool, as_json: bool) -> None:
    if output is not None:
        write_cluster(cluster, output, force=force)
    strayed = max(processor.spread or 0.0 for processor in cluster.processors)
    if strayed > _STRAYED:
        warnings.warn(
            f"measured speeds varied by {100 * strayed:.0f} %, and predictions will be off by as much: probe again when "
            "nothing else uses these machines",
            stacklevel=2,
        )
    if as_json:
        show_json(_record(cluster))
        return
    show(_processors(cluster), "", _links(cluster))
    for net, flop in cluster.sample_flop.items():
        show("", f"a sample of {net} costs {format_flop(flop, digits=2)} however few units a rank has")
    if output is not None:
        show("", f"written to {output}; next: {following}")


def _processors(cluster: Cluster) -> Table:
    fastest = max(cluster.speeds.values())
    rows = [
        {
            "name": processor.name,
            "host": processor.host,
            "speed": format_speed(processor.speed, digits=3),
            "relative": f"{processor.speed / fastest:.2f}",
            "spread": "" if processor.spread is None else f"{100 * processor.spread:.0f} %",
            "message": format_duration(processor.message_s, digits=2) if processor.message_s else "",
            "call": format_duration(processor.call_s, digits=2) if processor.call_s else "",
            "step": format_duration(processor.step_s, digits=2) if processor.step_s else "",
            "memory": "" if processor.memory_bytes is None else format_size(processor.memory_bytes, digits=3),
        }
        for processor in cluster.processors
    ]
    return table_of("processors", rows, texts=("name", "host"))


def _links(cluster: Cluster) -> Table:
    hosts = [processor.host for processor in cluster.processors]
    named = [(f"{one} - {other}" if one != other else f"within {one}", link) for (one, other), link in cluster.links.items()]
    if not named:
        assumed = "" if len(hosts) > 1 else " (assumed: one rank has no link to measure)"
        named = [(f"within {hosts[0]}{assumed}", cluster.local)]
    rows = [
        {
            "between": name,
            "latency": format_duration(link.latency_s, digits=3),
            "bandwidth": format_bandwidth(link.bandwidth_bytes_per_s, digits=3),
        }
        for name, link in named
    ]
    return table_of("links", rows, texts=("between",))


def _record(cluster: Cluster) -> dict[str, Any]:
    links = cluster.links or {(cluster.processors[0].host,) * 2: cluster.local}
    return {
        "processors": [
            {
                "name": processor.name,
                "host": processor.host,
                "speed_flop_per_s": float(processor.speed),
                "speed_by_size": list(processor.speed.points) if isinstance(processor.speed, SpeedTable) else None,
                "spread": processor.spread,
                "message_s": processor.message_s,
                "call_s": processor.call_s,
                "step_s": processor.step_s,
                "copy_bytes_per_s": processor.copy_bytes_per_s if processor.copy_bytes_per_s < math.inf else None,
                "memory_bytes": processor.memory_bytes,
            }
            for processor in cluster.processors
        ],
        "sample_flop": cluster.sample_flop,
        "links": [
            {"hosts": list(hosts), "latency_s": link.latency_s, "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s}
            for hosts, link in links.items()
        ],
    }


if TYPE_CHECKING:
    from torch import nn


def read_model(path: Path) -> tuple[nn.Module, Any]:
    """Return the network and the sample batch of a file, which is run as a program, but not as `__main__`.

    Args:
        path: a file that defines `build_model`, a function without arguments, and `sample`: inputs for at least two samples,
            or a function without arguments that makes them.

    Raises:
        InputError: as `read_script`; or `build_model` makes no network.
    """
    from torch import nn

    names = read_script(path, names=("build_model", "sample"))
    if not callable(names["build_model"]):
        raise InputError(f"build_model of {path} must be a function without arguments, not {names['build_model']!r}")
    model, sample = names["build_model"](), names["sample"]
    if not isinstance(model, nn.Module):
        raise InputError(f"build_model() of {path} returned {type(model).__name__}; it must return a torch.nn.Module")
    return model, sample() if callable(sample) and not isinstance(sample, nn.Module) else sample
