"""On each host that is examined: `python -m tatami.doctor.agent` tells its facts, then which of the other hosts it reaches.

It listens on a port of the system's choice, on all interfaces, and says one word to all who come. It reads orders from
standard input and ends with it, or after `LIVES_S`. `MARK` leads its answers: what a login shell prints comes the same way.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from tatami.doctor.host_facts import facts_here

MARK = "tatami doctor: "
WORD = b"tatami\n"
LIVES_S = 300


def main() -> None:
    """Tell the facts and the port; then, for each line of orders, who was reached."""
    signal.alarm(LIVES_S)
    listener = socket.create_server(("", 0), backlog=128)
    threading.Thread(target=_greet, args=(listener,), daemon=True).start()
    _answer({"facts": asdict(facts_here()), "port": listener.getsockname()[1]})
    for line in sys.stdin:
        order = json.loads(line)
        with ThreadPoolExecutor(max_workers=max(1, len(order["reach"]))) as pool:
            asked = [pool.submit(reach, host, port, limit_s=order["limit_s"]) for host, port in order["reach"]]
        _answer({"reached": [each.result() for each in asked]})


def reach(host: str, port: int, *, limit_s: float) -> float | str:
    """Seconds until the agent at `host` has said its word, or why it has not been reached."""
    began_s = time.perf_counter()
    try:
        with socket.create_connection((host, port), timeout=limit_s) as connection:
            connection.settimeout(limit_s)
            if connection.makefile("rb").readline() != WORD:
                return "another program answers"
    except TimeoutError:
        return f"no answer in {limit_s:g} s"
    except socket.gaierror as error:
        return f"the name is not known there ({error.strerror})"
    except OSError as error:
        return str(error.strerror or error)
    return time.perf_counter() - began_s


def _greet(listener: socket.socket) -> None:
    while True:
        with suppress(ConnectionError):  # the other end has reset it; the next one is greeted all the same
            connection, _ = listener.accept()
            with connection:
                connection.sendall(WORD)


def _answer(value: dict[str, Any]) -> None:
    print(f"{MARK}{json.dumps(value)}", flush=True)


if __name__ == "__main__":
    main()
