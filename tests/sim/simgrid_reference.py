"""SimGrid, which the simulator's times are held against: the same transfers over the same links, by its own models.

`python simgrid_reference.py` reads what is to be sent from stdin, and prints when each transfer ended. It is a process of its
own, as SimGrid has one engine a process, and its actors are threads that never end.
"""

import json
import os
import subprocess
import sys
from itertools import permutations
from typing import Any

from sim_rig import Transfers

from simgrid_here import simgrid
from tatami.sim.platforms import RDMA

# Without "Full", SimGrid 4.1 updates only what it thinks has changed: some of many flows that begin together run as if alone.
_ALL_FLOWS = "--cfg=network/optim:Full"
_RDMA = ("--cfg=network/model:CM02", "--cfg=network/TCP-gamma:0", "--cfg=network/crosstraffic:0", _ALL_FLOWS)
_TCP = ("--cfg=network/model:LV08", _ALL_FLOWS)


def simgrid_ends_s(transfers: Transfers) -> list[float]:
    """When each of the transfers ends, by SimGrid."""
    platform = transfers.platform
    hosts = range(len(platform.hosts))
    cables = {cable.name: cable for pair in permutations(hosts, 2) for cable in platform.way(*pair)}
    asked = {
        "arguments": _RDMA if platform.fabric == RDMA else _TCP,
        "hosts": len(hosts),
        "cables": [[each.name, each.bandwidth_bytes_per_s, each.latency_s, each.fat] for each in cables.values()],
        "ways": [[*pair, [cable.name for cable in platform.way(*pair)]] for pair in permutations(hosts, 2)],
        "sends": transfers.sends,
    }
    ran = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(asked),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found: list[float] = json.loads(ran.stdout.splitlines()[-1])
    return found


def _main(asked: dict[str, Any]) -> None:
    grid = simgrid()
    engine = grid.Engine(["reference", *asked["arguments"]])
    zone = engine.netzone_root.add_netzone_full("all")
    hosts = [zone.add_host(f"host{index}", 1.0).seal() for index in range(asked["hosts"])]
    links = {}
    for name, bandwidth, latency_s, fat in asked["cables"]:
        links[name] = zone.add_link(name, bandwidth).set_latency(latency_s)
        if fat:
            links[name].set_sharing_policy(grid.Link.SharingPolicy.FATPIPE, None)
        links[name].seal()
    for source, target, way in asked["ways"]:
        zone.add_route(hosts[source], hosts[target], [grid.LinkInRoute(links[name]) for name in way], False)
    zone.seal()
    ended_s = [0.0] * len(asked["sends"])

    def drive() -> None:
        going = [
            grid.Comm.sendto_async(hosts[source], hosts[target], round(size_bytes))
            for source, target, size_bytes in asked["sends"]
        ]
        for index, each in enumerate(going):
            each.wait()
            ended_s[index] = each.finish_time

    hosts[0].add_actor("driver", drive)
    engine.run()
    print(json.dumps(ended_s), flush=True)
    os._exit(0)


if __name__ == "__main__":
    _main(json.load(sys.stdin))
