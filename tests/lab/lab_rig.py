"""A small cluster for the tests of the lab, and what a lab may leave behind."""

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tatami.cluster import Cluster, Link, Processor
from tatami.lab.lab_state import STATES

JOB = Path(__file__).with_name("lab_job.py")
NETWORK = Link(bandwidth_bytes_per_s=12.5e6, latency_s=50e-6)  # 100 Mbit/s
CLUSTER = Cluster(
    processors=tuple(Processor(name=f"p{i}", speed=speed, host=f"h{i}") for i, speed in enumerate((1.0, 1.0, 0.5), start=1)),
    network=NETWORK,
)
CLUSTER_TOML = """
[network]
bandwidth = "100 Mbit/s"
latency = "50 us"

[[processors]]
name = "p1"
speed = 1.0
host = "h1"

[[processors]]
name = "p2"
speed = 1.0
host = "h2"

[[processors]]
name = "p3"
speed = 0.5
host = "h3"
"""

HELD = 1000, 30_000, 1000
"""Sizes of a perceptron whose weights take 240 MB: with gradients and momentum three times as much, on four hosts a quarter."""
HELD_SAMPLES = 8
HELD_MEMORY = "300 MiB"
"""Of a host, for a network."""
_BESIDE_MIB = 300
"""What a rank takes beside its network after `tatami.init`, its libraries' files among it: less than that."""
_STARTED = """
import tatami
tatami.init()
tatami.tile
with open("/proc/self/status") as file:
    print(next(int(line.split()[1]) >> 10 for line in file if line.startswith("RssAnon")))
"""


@functools.cache
def base_memory() -> str:
    """Of a host, beside the network: torch's build for CUDA takes far more than that for CPUs."""
    done = subprocess.run([sys.executable, "-c", _STARTED], capture_output=True, text=True, timeout=800, check=True)
    return f"{int(done.stdout) + _BESIDE_MIB} MiB"


def holding(hosts: int) -> Cluster:
    """So many hosts, none of which holds that perceptron."""
    processors = tuple(Processor(name=f"p{i}", speed=1.0, host=f"h{i}", memory=HELD_MEMORY) for i in range(hosts))
    return Cluster(processors=processors, network=NETWORK)


def traces(name: str) -> list[str]:
    """All that there is of a lab on this machine: namespaces, control groups, files, and processes that know its name."""
    folders = [Path("/run/netns"), STATES, Path(tempfile.gettempdir())]
    found = [str(path) for folder in folders if folder.is_dir() for path in folder.glob(f"{name}*")]
    found += [str(path) for path in Path("/sys/fs/cgroup").glob(f"**/{name}*")]
    return found + [f"process {pid}" for pid in processes_of(name)]


def processes_of(name: str) -> list[int]:
    """The processes whose command line or control group names the lab."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                if name.encode() in (folder / "cmdline").read_bytes() + (folder / "cgroup").read_bytes():
                    found.append(int(folder.name))
            except OSError:  # it has ended meanwhile
                continue
    return found


def interfaces() -> list[str]:
    """The network interfaces of the machine itself."""
    return sorted(path.name for path in Path("/sys/class/net").iterdir())
