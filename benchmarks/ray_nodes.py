"""The hosts of a lab as nodes of one Ray cluster:  python -m ray_nodes HEAD OWN FOLDER STORE_BYTES

becomes the node at the address OWN, the head where that is HEAD; FOLDER is for Ray's files. `ray_cluster` starts one on each
host of a lab, and `drive` a process on the first, which uses them.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import SEEK_END
from pathlib import Path
from typing import Any, BinaryIO

from elsewhere import python_path
from tatami.errors import LabError
from tatami.lab import Lab

PORT = 6379
_PATIENCE_S = 240.0
_APART_S = 6.0
_TAIL_BYTES = 2000
_SETTINGS = {
    "RAY_AUTH_MODE": "disabled",  # no other process reaches the network of a lab
    "RAY_worker_niceness": "0",  # Ray's own 15 lets every other program of the machine go first
    "GLOO_SOCKET_IFNAME": "eth0",
}


@contextmanager
def ray_cluster(
    lab: Lab, *, folder: Path, store_bytes: int = 1 << 27, environment: Mapping[str, str] | None = None
) -> Iterator[BinaryIO]:
    """Start a node on each host of `lab`, which end with it; gives what they say. `await_nodes` waits for them.

    Args:
        folder: for Ray's files; all hosts see it.
        store_bytes: shared memory of each node.
        environment: of the nodes, and of the processes that they start.
    """
    settings = {**python_path(), **_SETTINGS, **(environment or {})}
    head = lab.plan.hosts[0].address
    with (folder / "ray.log").open("a+b") as log:
        for host in lab.plan.hosts:
            words = [sys.executable, "-m", "ray_nodes", head, host.address, str(folder), str(store_bytes)]
            lab.spawn(host.name, words, limited=False, environment=settings, stdout=log)
        yield log


def address_of(lab: Lab) -> str:
    """Of the cluster that `ray_cluster` starts."""
    return f"{lab.plan.hosts[0].address}:{PORT}"


def drive(
    lab: Lab, words: Sequence[str], *, log: BinaryIO, timeout_s: float, environment: Mapping[str, str] | None = None
) -> None:
    """Run `words` on the first host, at the machine's full speed.

    Raises:
        LabError: it failed, or did not end in time; shows what the nodes of Ray have said.
    """
    settings = {**python_path(), **_SETTINGS, **(environment or {})}
    driver = lab.spawn(lab.plan.hosts[0].name, words, limited=False, environment=settings)
    try:
        code = driver.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        driver.kill()
        raise LabError(f"the runs on Ray did not end within {timeout_s:g} s; {_said(log)}") from None
    if code != 0:
        raise LabError(f"the runs on Ray ended with exit code {code}; what they said is above; {_said(log)}")


def await_nodes(ray: Any, wanted: int) -> None:
    """Until so many nodes are up.

    Raises:
        LabError: they are not in time.
    """
    limit_s = time.monotonic() + _PATIENCE_S
    while (alive := sum(each["Alive"] for each in ray.nodes())) < wanted:
        if time.monotonic() > limit_s:
            raise LabError(f"only {alive} of {wanted} nodes of Ray were up after {_PATIENCE_S:.0f} s")
        time.sleep(0.2)


def await_port(address: str) -> None:
    """Until the head answers.

    Raises:
        LabError: it does not in time.
    """
    host, _, port = address.rpartition(":")
    limit_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            with socket.create_connection((host, int(port)), timeout=1.0):
                return
        except OSError as error:
            if time.monotonic() > limit_s:
                raise LabError(f"the head of Ray at {address} did not answer for {_PATIENCE_S:.0f} s") from error
            time.sleep(0.2)


def be_node(head: str, own: str, folder: str, store_bytes: str) -> None:
    """Become a node of Ray; ends with the lab."""
    words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", "--num-cpus=1"]
    words += [f"--node-ip-address={own}", f"--object-store-memory={store_bytes}"]
    if own == head:
        words += ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={folder}"]
    else:
        await_port(f"{head}:{PORT}")
        # Nodes share a folder, and two that start at the same time take the same names in it.
        time.sleep(_APART_S * int(own.rpartition(".")[2]))
        words.append(f"--address={head}:{PORT}")
    os.execv(sys.executable, words)


def _said(log: BinaryIO) -> str:
    log.seek(max(0, log.seek(0, SEEK_END) - _TAIL_BYTES))
    return f"the last words of Ray's nodes:\n{log.read().decode(errors='replace')}"


if __name__ == "__main__":
    be_node(*sys.argv[1:])
