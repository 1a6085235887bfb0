"""Whether this machine can be a lab: everything that one needs is tried once, in miniature."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from tatami.errors import LabError
from tatami.lab.groups import find_groups
from tatami.lab.network import INSTEAD, succeeds

_NETWORK_PARTS = (
    ("a bridge", ("ip", "-n", "{probe}", "link", "add", "eth0", "type", "bridge")),
    ("veth pairs", ("ip", "-n", "{probe}", "link", "add", "port0", "type", "veth", "peer", "name", "port1")),
    ("rates by htb", ("tc", "-n", "{probe}", "qdisc", "add", "dev", "lo", "root", "handle", "1:", "htb", "default", "1")),
)


def require_lab() -> None:
    """Whether a lab can be built here.

    Raises:
        LabError: it cannot; one sentence says what is missing, and another what works instead.
    """
    if (problem := missing()) is not None:
        raise LabError(f"{problem}. {INSTEAD}")


def missing() -> str | None:
    """What keeps this machine from being a lab, as one sentence without its full stop; None where nothing does."""
    if not sys.platform.startswith("linux"):
        return f"a lab is made of Linux's network namespaces and control groups, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "a lab needs root, for network namespaces and CPU quotas: run it with sudo, or in a container with --privileged"
    if absent := [name for name in ("ip", "tc") if shutil.which(name) is None]:
        return f"a lab needs the program{'s' if len(absent) > 1 else ''} {' and '.join(absent)}: apt-get install iproute2"
    probe = f"tatami-probe-{os.getpid()}"
    return _missing_groups(probe) or _missing_network(probe)


def _missing_groups(probe: str) -> str | None:
    try:
        groups = find_groups(probe, mounts=Path("/proc/mounts").read_text(encoding="utf-8"))
        try:
            groups.build_lab()
        finally:
            groups.remove()
    except LabError as error:
        return f"a lab needs CPU quotas: {str(error).removesuffix(INSTEAD).rstrip(' .')}"
    return None


def _missing_network(probe: str) -> str | None:
    if not succeeds(("ip", "netns", "add", probe)):
        return "a lab needs network namespaces, and `ip netns add` fails here (in a container: start it with --privileged)"
    try:
        for what, words in _NETWORK_PARTS:
            if not succeeds([word.format(probe=probe) for word in words]):
                return f"a lab needs {what} in a network namespace, and `{' '.join(words).format(probe=probe)}` fails here"
    finally:
        succeeds(("ip", "netns", "delete", probe))
    return None
