"""Several hosts at once: a process on each, started as MPI starts its own, tells what is there and whom it reaches."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from tatami.doctor.agent import MARK
from tatami.doctor.host_facts import HostFacts
from tatami.errors import InputError, shortened

SHELL_VARIABLE = "HYDRA_LAUNCHER_EXEC"
"""MPICH's own: the program that it calls in place of ssh."""
MOST_HOSTS = 256
PATIENCE_S = 60.0
CONNECT_S = 3.0
_END_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What became of several hosts.

    Attributes:
        facts: of the hosts that answered, by the names that were given.
        silent: what was said instead by those that did not.
        reached: from host to host: the seconds until a connection was answered, or why there was none.
    """

    facts: Mapping[str, HostFacts]
    silent: Mapping[str, str]
    reached: Mapping[tuple[str, str], float | str]


def examine(hosts: Sequence[str], *, patience_s: float = PATIENCE_S, connect_s: float = CONNECT_S) -> Examination:
    """Start a process on each host and on this one, and let each connect to each.

    Args:
        hosts: names, each with its number of ranks or without, as `tatami run --hosts` takes them.
        patience_s: for a host to answer.
        connect_s: for a connection.

    Raises:
        InputError: invalid or too many names.
    """
    names = host_names(hosts)
    local = {socket.gethostname(), "localhost", "127.0.0.1"}
    # mpiexec listens on this machine: the hosts must reach it also where it has no ranks.
    if not local & set(names):
        names.append(socket.gethostname())
    with ThreadPoolExecutor(max_workers=len(names)) as pool:
        agents = list(pool.map(lambda name: _Agent(name, here=name in local, patience_s=patience_s), names))
        try:
            seen = {agent.name: answer for agent, answer in zip(agents, pool.map(_Agent.answer, agents), strict=True)}
            facts = {name: _facts(answer) for name, answer in seen.items() if answer is not None}
            silent = {agent.name: agent.last_words() for agent in agents if agent.name not in facts}
            silent |= dict.fromkeys((name for name in facts if facts[name] is None), "Tatami is there in another version")
            there = {name: seen[name] for name, known in facts.items() if known is not None}
            others = {name: [other for other in there if other != name] for name in there}
            living = [agent for agent in agents if agent.name in there]

            def asked(agent: _Agent) -> Any:
                agent.order({"reach": [[o, there[o]["port"]] for o in others[agent.name]], "limit_s": connect_s})
                return agent.answer()

            found = dict(zip((agent.name for agent in living), pool.map(asked, living), strict=True))
        finally:
            for agent in agents:
                agent.end()
    lost = "the process there ended"
    return Examination(
        facts={name: known for name, known in facts.items() if known is not None},
        silent=silent,
        reached={
            (name, other): found[name]["reached"][index] if found[name] else lost
            for name in there
            for index, other in enumerate(others[name])
        },
    )


def host_names(hosts: Sequence[str]) -> list[str]:
    """The names without their numbers of ranks, each once.

    Raises:
        InputError: invalid or too many names.
    """
    if not hosts or not all(re.fullmatch(r"\w[\w.-]{0,252}(:[1-9]\d{0,8})?", host) for host in hosts):
        raise InputError(f"hosts {shortened(','.join(hosts))!r}: give names, as in node1,node2 or node1:4,node2:4")
    names = list(dict.fromkeys(host.partition(":")[0] for host in hosts))
    if len(names) > MOST_HOSTS:
        raise InputError(f"{len(names)} hosts are too many to examine at once; give at most {MOST_HOSTS}")
    return names


def agent_command(host: str, *, here: bool) -> list[str]:
    """How the process on `host` is started: by this Python, or by ssh, in this folder, as MPICH starts ranks."""
    words = [sys.executable, "-m", "tatami.doctor.agent"]
    if here:
        return words
    set_path = [f"PYTHONPATH={os.environ['PYTHONPATH']}"] if "PYTHONPATH" in os.environ else []
    there = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(['env', *set_path, *words])}"
    if SHELL_VARIABLE in os.environ:
        return [os.environ[SHELL_VARIABLE], host, there]
    return ["ssh", "-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", host, there]


def _facts(answer: Any) -> HostFacts | None:
    """None where they are those of another version of this module."""
    try:
        return HostFacts(**answer["facts"])
    except (KeyError, TypeError):
        return None


class _Agent:
    """The process on one host, seen from here; it is killed where an answer takes longer than `patience_s`."""

    def __init__(self, name: str, *, here: bool, patience_s: float) -> None:
        self.name, self._patience_s, self._said = name, patience_s, ""
        self._was_late = False
        self._process: subprocess.Popen[str] | None = None
        try:
            self._process = subprocess.Popen(
                agent_command(name, here=here),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            self._said = f"{error.filename}: {error.strerror}"

    def answer(self) -> Any:
        """Its next answer; None where it ends or is late."""
        if self._process is None:
            return None
        timer = threading.Timer(self._patience_s, self._too_late)
        timer.daemon = True
        timer.start()
        try:
            for line in _stream(self._process.stdout):
                if line.startswith(MARK):
                    return json.loads(line.removeprefix(MARK))
        finally:
            timer.cancel()
        return None

    def order(self, value: dict[str, Any]) -> None:
        if self._process is not None:
            try:
                stream = _stream(self._process.stdin)
                stream.write(json.dumps(value) + "\n")
                stream.flush()
            except OSError:  # it has ended, which its answer will tell
                pass

    def last_words(self) -> str:
        """What it, or ssh, has written to standard error, at its end."""
        if self._process is None:
            return self._said
        errors = self._rest()
        if self._was_late:
            return f"no answer in {self._patience_s:g} s"
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        return shortened(lines[-1]) if lines else f"ended with exit code {self._process.returncode}, and said nothing"

    def end(self) -> None:
        self._kill()
        self._rest()

    def _too_late(self) -> None:
        self._was_late = True
        self._kill()

    def _kill(self) -> None:
        """With all that it has started here, which would keep the pipes open."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _rest(self) -> str:
        """What it has written to standard error, when it has ended."""
        if self._process is None:
            return ""
        with suppress(subprocess.TimeoutExpired, ValueError):  # ended and read before
            return self._process.communicate(timeout=_END_S)[1]
        return ""


def _stream(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe
