"""What a lab's check runs on hosts: `python -I -S load.py compute|receive|send ...`; each prints one number.

`compute START SECONDS`: rounds of a fixed computation done in that time, beginning at START of the monotonic clock.
`receive PORT SKIP SECONDS`: bytes a second that come in during SECONDS, after the first SKIP.
`send ADDRESS PORT`: send until the other side has enough.
"""

import socket
import sys
import time
from contextlib import suppress

_ROUND = 2000
_BUFFER_BYTES = 1 << 18
_MOST_READS = 100


def main() -> None:
    """Run one of the three."""
    what, *words = sys.argv[1:]
    if what == "compute":
        print(compute(float(words[0]), duration_s=float(words[1])))
    elif what == "receive":
        receive(int(words[0]), skip_s=float(words[1]), duration_s=float(words[2]))
    else:
        send(words[0], int(words[1]))


def compute(start_s: float, *, duration_s: float) -> int:
    """Rounds done in `duration_s` seconds; a round takes some 0.1 ms of a core."""
    while (left_s := start_s - time.monotonic()) > 0:
        time.sleep(left_s)
    rounds, total = 0, 0
    while time.monotonic() < start_s + duration_s:
        for number in range(_ROUND):
            total += number * number
        rounds += 1
    return rounds


def receive(port: int, *, skip_s: float, duration_s: float) -> None:
    """Wait for a sender, say so, and measure: from the first arrival after `skip_s` to the last one.

    What has come before it is read came at a rate of its own where this process had no core meanwhile. So the measurement
    begins when all that had come is read: nothing that comes in it can have come faster than the link lets it.
    """
    with socket.create_server(("0.0.0.0", port)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
    buffer = bytearray(_BUFFER_BYTES)
    connection.recv_into(buffer)
    begin_s = time.monotonic()
    first_s = last_s = 0.0
    received = 0
    while connection_size := connection.recv_into(buffer):
        last_s = time.monotonic()
        if last_s < begin_s + skip_s:
            continue
        if first_s == 0.0:
            first_s = _when_all_is_read(connection, buffer)
            continue
        received += connection_size
        if last_s > first_s + duration_s:
            break
    connection.close()
    print(received / (last_s - first_s) if last_s > first_s else 0.0)


def _when_all_is_read(connection: socket.socket, buffer: bytearray) -> float:
    """The moment before the socket was found empty; of a link as fast as it is read, after more than any socket holds."""
    now_s = time.monotonic()
    connection.setblocking(False)
    with suppress(BlockingIOError):
        for _ in range(_MOST_READS):
            connection.recv_into(buffer)
            now_s = time.monotonic()
    connection.setblocking(True)
    return now_s


def send(address: str, port: int) -> None:
    """Send until the connection is closed."""
    data = bytes(_BUFFER_BYTES)
    with socket.create_connection((address, port)) as connection:
        try:
            while True:
                connection.sendall(data)
        except (ConnectionResetError, BrokenPipeError):
            return


if __name__ == "__main__":
    main()
