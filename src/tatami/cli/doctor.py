"""`tatami doctor`: check what is installed, what differs between hosts, and say what to do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from tatami.cli.options import epilog, optional
from tatami.cli.terminal import show, show_json, tell

if TYPE_CHECKING:
    from tatami.doctor import Diagnosis, MachineLoad

EPILOG = epilog(
    "tatami doctor",
    "tatami doctor --hosts old,new",
    "Exit code 0: everything installed works; 1: something does not, and the last lines say what to do.",
)
_LOOK_S = 0.5


def doctor(
    *,
    hosts: Annotated[
        str | None, optional(metavar="A,B", help="Also check these machines and the connections between them.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only check what is installed; start nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON record.")] = False,
) -> None:
    """Check what is installed and whether it works (MPI, Ray, CUDA, cores, memory), and say how to fix what does not.

    With --hosts, log in to each host by ssh, as `tatami run --hosts` does, and find versions that differ, unknown host names,
    and connections that a firewall blocks.
    """
    from tatami.doctor import compared, connected, diagnosed, examine, facts_here, steps_to_take, tried
    from tatami.doctor.hosts import host_names

    names = host_names(hosts.split(",")) if hosts is not None else []
    load = _load_now()
    facts = facts_here()
    found = diagnosed(facts)
    if load is not None:
        found.append(_load_diagnosis(load))
    if not quick:
        tell("testing what is installed ...", style="dim")
        found += tried(facts)
    if names:
        tell(f"checking {len(names)} hosts ...", style="dim")
        examined = examine(names)
        found += compared(examined.facts, silent=examined.silent)
        found += connected(examined.reached)
    steps = steps_to_take(found)
    if as_json:
        show_json({"found": [asdict(each) for each in found], "steps": steps, "facts": asdict(facts)})
    else:
        _show(found, steps, hosts=hosts)
    raise typer.Exit(int(any(each.is_problem for each in found)))


def _show(found: Sequence[Diagnosis], steps: Sequence[str], *, hosts: str | None) -> None:
    across = max(len(each.what) for each in found)
    for each in found:
        mark, style = ("!!", "bold red") if each.is_problem else ("--", "dim") if each.advice else ("ok", "green")
        show(Text.assemble((mark, style), f"  {each.what:<{across}}  ", (each.seen, "bold" if each.is_problem else "")))
    show("", "What to do:" if steps else "Nothing is missing.")
    for number, step in enumerate(steps, 1):
        show(f"{number:>3}. {step}")
    if not any(each.is_problem for each in found):
        probe = f"tatami probe -n {len(hosts.split(','))} --hosts {hosts} -o cluster.toml" if hosts else "tatami demo"
        show("", f"Everything installed works. Next: {probe}")


def _load_now() -> MachineLoad | None:
    from tatami.doctor import LoadWatch

    watch = LoadWatch()
    began_s = time.process_time()
    time.sleep(_LOOK_S)
    return watch.load(own_s=time.process_time() - began_s)


def _load_diagnosis(load: MachineLoad) -> Diagnosis:
    from tatami.doctor import Diagnosis

    advice = "do not measure while other programs run: they would distort times, speeds and plans"
    return Diagnosis(what="load", seen=load.sentence(), advice=advice if load.is_busy else None)
