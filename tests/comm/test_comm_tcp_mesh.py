"""Messages over TCP: matched, in order, whole, and broken for both sides at once."""

import json
import select
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tatami.comm.rendezvous import (
    INTERFACE_VARIABLE,
    PROOF_BYTES,
    Door,
    KnownMeeting,
    StoreMeeting,
    Whereabouts,
    address_of_this_host,
    hello,
    welcome,
)
from tatami.comm.stall_report import ProcessPlace
from tatami.comm.tcp_connection import LARGEST_BYTES, TcpConnection, Transfer
from tatami.comm.tcp_mesh import TcpMesh
from tatami.errors import CommError, InputError

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this build of torch has no torch.distributed")
KEY, OTHER_KEY = (1, 0), (1, 1)
_LIMIT_S = 60.0
_FOR_EVER_S = 1e5
"""Longer than a test may take: a wait that nothing ends is a failure."""


def _pair() -> tuple[TcpConnection, TcpConnection]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return TcpConnection(one), TcpConnection(other)


def _settle(transfers: list[Transfer], *connections: TcpConnection) -> None:
    """Move until all are settled."""
    while not all(each.is_settled for each in transfers):
        poll = select.poll()
        for connection in connections:
            poll.register(connection.socket, connection.events)
        assert poll.poll(_LIMIT_S * 1000), "nothing can move, and not all is settled"
        for connection in connections:
            connection.push()
            connection.pull()


def _room(size: int) -> memoryview:
    return memoryview(bytearray(size))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3000)), max_size=12), st.data())
@settings(max_examples=50, deadline=None)
def test_messages_are_matched_by_tag_in_the_order_in_which_they_were_sent(
    messages: list[tuple[int, int]], data: st.DataObject
) -> None:
    sender, receiver = _pair()
    contents = [bytes([number + 1]) * size for number, (_, size) in enumerate(messages)]
    sent = [sender.send((7, tag), memoryview(content)) for (tag, _), content in zip(messages, contents, strict=True)]
    # Received in any order of the tags: those of one tag come in the order in which they were sent.
    order = data.draw(st.permutations([tag for tag, _ in messages]))
    left = {tag: [content for (one, _), content in zip(messages, contents, strict=True) if one == tag] for tag in range(3)}
    for tag in order:
        content = left[tag].pop(0)
        room = _room(len(content))
        _settle([receiver.expect((7, tag), room)], sender, receiver)
        assert bytes(room) == content
    _settle(sent, sender, receiver)
    sender.socket.close()
    receiver.socket.close()


def _announce(connection: TcpConnection, key: tuple[int, int], size_bytes: int) -> None:
    connection.socket.setblocking(True)
    connection.socket.sendall(struct.pack("<QQQ", *key, size_bytes))


def test_a_message_takes_the_memory_of_what_has_come_and_not_of_what_was_announced() -> None:
    one, other = _pair()
    _announce(one, KEY, LARGEST_BYTES)
    waited = other.expect(OTHER_KEY, _room(5))
    one.socket.sendall(bytes(3 << 20))
    tracemalloc.start()
    while other._arriving is None or len(other._arriving.into) < 4 << 20:
        other.pull()
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()
    assert not waited.is_settled
    one, other = _pair()
    _announce(one, KEY, LARGEST_BYTES + 1)
    waited = other.expect(OTHER_KEY, _room(5))
    while not waited.is_settled:
        other.pull()
    assert waited.is_broken
    assert waited.problem == f"the other end announced a message of {LARGEST_BYTES + 1} bytes, which is none of Tatami's"


@pytest.mark.parametrize("size", [(1 << 20) - 1, 1 << 20, (1 << 20) + 1, (5 << 20) + 3])
def test_a_large_message_that_is_early_comes_whole(size: int) -> None:
    one, other = _pair()
    content = bytes(range(256)) * (size // 256 + 1)
    sent = [one.send(KEY, memoryview(content)[:size]), one.send(OTHER_KEY, memoryview(b"small"))]
    _settle([other.expect(OTHER_KEY, _room(5)), *sent], one, other)
    room = _room(size)
    assert other.expect(KEY, room).is_settled
    assert room == content[:size]


def test_large_messages_cross_each_other() -> None:
    one, other = _pair()
    size = 32 << 20  # more than the system keeps
    given = [memoryview(bytes([number]) * size) for number in (3, 4)]
    rooms = [_room(size), _room(size)]
    transfers = [one.send(KEY, given[0]), other.send(KEY, given[1]), one.expect(KEY, rooms[0]), other.expect(KEY, rooms[1])]
    _settle(transfers, one, other)
    assert rooms[0] == given[1]
    assert rooms[1] == given[0]


def test_what_is_not_expected_stays_with_its_sender() -> None:
    one, other = _pair()
    large = one.send(KEY, memoryview(bytes(32 << 20)))
    assert not large.is_settled
    assert other.events == 0, "nothing is read where nothing is expected"
    small = one.send(OTHER_KEY, memoryview(b"small"))
    room = _room(5)
    _settle([other.expect(OTHER_KEY, room), large, small], one, other)
    assert bytes(room) == b"small"
    came = _room(32 << 20)
    assert other.expect(KEY, came).is_settled, "it came before the one that was waited for"


@pytest.mark.parametrize("is_early", [False, True])
def test_a_message_of_another_size_is_a_problem_of_this_message_only(is_early: bool) -> None:
    one, other = _pair()
    one.send(KEY, memoryview(b"four"))
    one.send(OTHER_KEY, memoryview(b"next"))
    room = _room(4)
    if is_early:
        _settle([other.expect(OTHER_KEY, room)], one, other)
        wrong = other.expect(KEY, _room(3))
    else:
        wrong = other.expect(KEY, _room(3))
        _settle([wrong, other.expect(OTHER_KEY, room)], one, other)
    assert wrong.is_settled
    assert not wrong.is_broken
    assert wrong.problem == "4 bytes came where 3 were expected; shapes and dtypes must agree on both sides"
    assert bytes(room) == b"next"


def test_what_is_withdrawn_takes_no_message() -> None:
    one, other = _pair()
    withdrawn = other.expect(KEY, _room(5))
    other.withdraw(withdrawn)
    assert other.events == 0
    one.send(KEY, memoryview(b"first"))
    room = _room(5)
    _settle([other.expect(KEY, room)], one, other)
    assert bytes(room) == b"first"
    assert not withdrawn.is_settled


def test_a_message_that_has_begun_to_leave_leaves_whole() -> None:
    one, other = _pair()
    large = memoryview(bytes([9]) * (32 << 20))
    leaving, waiting, last = one.send(KEY, large), one.send(KEY, memoryview(b"never")), one.send(KEY, memoryview(b"after"))
    one.withdraw(leaving)
    one.withdraw(waiting)
    room, next_room = _room(len(large)), _room(5)
    _settle([other.expect(KEY, room), other.expect(KEY, next_room), leaving, last], one, other)
    assert room == large
    assert bytes(next_room) == b"after"


def test_the_end_of_the_other_side_settles_all_and_what_comes_later() -> None:
    one, other = _pair()
    one.send(KEY, memoryview(b"last words"))
    one.socket.close()
    room = _room(10)
    waited = [other.expect(KEY, room), other.expect(KEY, _room(1)), other.expect(OTHER_KEY, _room(1))]
    _settle(waited, other)
    assert bytes(room) == b"last words"
    assert [each.problem for each in waited] == ["", *2 * ["it was closed at the other end"]]
    later = [other.expect(KEY, _room(1)), other.send(KEY, memoryview(b"1"))]
    assert all(each.is_settled and each.is_broken for each in later)


def _store() -> Any:
    return cast(Any, dist).HashStore()


def _mesh(store: Any, *, rank: int, size: int, token: bytes = b"of this job") -> TcpMesh:
    return TcpMesh(StoreMeeting(store, rank=rank, size=size, token=token), rank=rank, size=size)


def _meshes(size: int) -> list[TcpMesh]:
    store = _store()
    meshes = [_mesh(store, rank=rank, size=size) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(lambda mesh: mesh.connect(_never), meshes))
    return meshes


def _never(_: Sequence[int]) -> None:
    """Nothing calls the meeting off."""


def _wait(mesh: TcpMesh, *transfers: Transfer) -> None:
    def is_over() -> bool:
        return all(each.is_settled for each in transfers)

    while not is_over():
        mesh.progress(_FOR_EVER_S, is_over=is_over)


def _on_each(meshes: list[TcpMesh], run: Callable[[int], None]) -> None:
    with ThreadPoolExecutor(len(meshes)) as pool:
        list(pool.map(run, range(len(meshes))))


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INTERFACE_VARIABLE, "lo")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_sends_to_each(size: int) -> None:
    meshes = _meshes(size)
    rooms = {(rank, other): _room(1000) for rank in range(size) for other in range(size)}

    def exchange(rank: int) -> None:
        others = [other for other in range(size) if other != rank]
        transfers = [meshes[rank].expect(other, KEY, rooms[rank, other]) for other in others]
        transfers += [meshes[rank].send(other, KEY, memoryview(bytes([rank * size + other]) * 1000)) for other in others]
        _wait(meshes[rank], *transfers)
        assert not meshes[rank].is_busy

    _on_each(meshes, exchange)
    for (rank, other), room in rooms.items():
        assert bytes(room) == bytes([other * size + rank if rank != other else 0]) * 1000
    for mesh in meshes:
        mesh.close()


def test_a_thread_that_waits_moves_what_another_begins() -> None:
    one, other = meshes = _meshes(2)
    room, answer = _room(3), _room(32 << 20)
    waited = one.expect(1, KEY, room)
    waiting = threading.Thread(target=_wait, args=(one, waited))
    waiting.start()
    large = one.send(1, OTHER_KEY, memoryview(bytes(32 << 20)))  # it does not leave at once
    _wait(other, other.expect(0, OTHER_KEY, answer))
    _wait(one, large)
    _wait(other, other.send(0, KEY, memoryview(b"end")))
    waiting.join(_LIMIT_S)
    assert bytes(room) == b"end"
    for mesh in meshes:
        mesh.close()


def test_what_is_over_by_now_is_not_waited_for() -> None:
    """Another thread may have moved the last of it, and wait for something of its own since."""
    one, other = meshes = _meshes(2)
    waited = one.expect(1, KEY, _room(3))
    waiting = threading.Thread(target=_wait, args=(one, waited))
    waiting.start()
    while not one._is_polling:
        time.sleep(0.001)
    one.progress(_FOR_EVER_S, is_over=lambda: True)
    _wait(other, other.send(0, KEY, memoryview(b"end")))
    waiting.join(_LIMIT_S)
    assert waited.is_settled
    for mesh in meshes:
        mesh.close()


def test_severed_connections_end_the_waits_of_both_sides() -> None:
    meshes = _meshes(3)
    waited = [meshes[0].expect(1, KEY, _room(1)), meshes[0].expect(2, KEY, _room(1)), meshes[1].expect(0, KEY, _room(1))]
    threads = [
        threading.Thread(target=_wait, args=(meshes[0], *waited[:2])),
        threading.Thread(target=_wait, args=(meshes[1], waited[2])),
    ]
    for thread in threads:
        thread.start()
    meshes[0].sever()
    for thread in threads:
        thread.join(_LIMIT_S)
    assert [each.is_broken for each in waited] == [True] * 3
    for mesh in meshes:
        mesh.close()


def test_a_stranger_is_turned_away() -> None:
    store = _store()
    one = _mesh(store, rank=0, size=2)
    host, port = json.loads(store.get("0"))[:2]
    assert host == "127.0.0.1"
    stranger = socket.create_connection((host, port))
    stranger.sendall(hello(b"another key", 1, to=0))
    silent = socket.create_connection((host, port))  # and keeps none of the others waiting
    other = _mesh(store, rank=1, size=2)
    meeting = threading.Thread(target=one.connect, args=(_never,))
    meeting.start()
    stranger.settimeout(_LIMIT_S)
    assert stranger.recv(1) == b""
    other.connect(_never)
    meeting.join(_LIMIT_S)
    assert not meeting.is_alive()
    silent.settimeout(_LIMIT_S)
    assert silent.recv(1) == b""
    _greet(one, other)
    one.close()
    other.close()


def test_who_knows_the_store_and_not_the_token_becomes_no_rank() -> None:
    """It takes the place of a rank that is late: of rank 1 by connecting, of rank 0 by letting others connect."""
    store = _store()
    ranks = [_mesh(store, rank=0, size=2), _mesh(store, rank=1, size=2, token=b"a stranger's")]

    def wait_a_moment(look: Sequence[int]) -> None:
        if look == [1] and not connected.is_set():
            return
        raise CommError(f"{look} did not come")

    connected = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        admitting = pool.submit(ranks[0].connect, wait_a_moment)
        with pytest.raises(CommError, match=r"who answers for rank 0 at 127.0.0.1:\d+ closed the connection .*TATAMI_TOKEN"):
            ranks[1].connect(_never)
        connected.set()
        with pytest.raises(CommError, match=r"\[1\] did not come"):
            admitting.result(_LIMIT_S)

    store, door = _store(), Door()
    rank = _mesh(store, rank=1, size=2)
    store.set("0", json.dumps([*door.address, "host", "kernel", 1, "nonce"]))
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(rank.connect, _never)
        guest, _ = _accepted(door)
        guest.sendall(bytes(PROOF_BYTES))
        with pytest.raises(CommError, match=r"who answers for rank 0 at 127.0.0.1:\d+ is not of this job"):
            connecting.result(_LIMIT_S)
    guest.close()
    door.close()
    for mesh in (*ranks, rank):
        mesh.close()


def _accepted(door: Door) -> tuple[socket.socket, Any]:
    door._listener.setblocking(True)
    return door._listener.accept()


@pytest.mark.parametrize("entry", [b"no JSON", b"[1, 2]", b'["h", 1, "n", "k", "pid", ""]', b"[" * 1000, b" " * 2000])
def test_what_another_program_wrote_into_the_store_is_refused(entry: bytes) -> None:
    store = _store()
    mesh = _mesh(store, rank=1, size=2)
    store.set("0", entry)
    with pytest.raises(CommError, match=r"rank 0 wrote .* into the store of the job, which is not an address"):
        mesh.connect(_never)
    mesh.close()


def _known(doors: Sequence[Door], rank: int, token: bytes) -> KnownMeeting:
    there = tuple(Whereabouts(place=ProcessPlace.here(), door=door.address) for door in doors)
    return KnownMeeting(door=doors[rank], token=token, there=there)


def _greet(one: TcpMesh, other: TcpMesh) -> None:
    """Rank 1 of two sends to rank 0."""
    room = _room(2)
    _wait(other, other.send(0, KEY, memoryview(b"us")))
    _wait(one, one.expect(1, KEY, room))
    assert bytes(room) == b"us"


def test_a_door_that_stays_keeps_who_comes_early_for_the_next_meeting() -> None:
    doors, tokens = [Door(), Door()], [b"1" * 16, b"2" * 16]
    early = TcpMesh(_known(doors, 1, tokens[1]), rank=1, size=2)
    with ThreadPoolExecutor(2) as pool:
        coming = pool.submit(early.connect, _never)
        first = [TcpMesh(_known(doors, rank, tokens[0]), rank=rank, size=2) for rank in range(2)]
        pool.submit(first[1].connect, _never)
        first[0].connect(_never)
        _greet(*first)
        assert not coming.done()
        late = TcpMesh(_known(doors, 0, tokens[1]), rank=0, size=2)
        late.connect(_never)
        assert [each.door for each in coming.result(_LIMIT_S)] == [door.address for door in doors]
        _greet(late, early)
    for mesh in (*first, late, early):
        mesh.close()
    for door in doors:
        door.close()


def test_a_door_keeps_a_bounded_number_of_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tatami.comm.rendezvous._MOST_KEPT", 2)
    door = Door()
    strangers = [socket.create_connection(door.address) for _ in range(4)]
    for number, each in enumerate(strangers):
        each.sendall(hello(bytes([number]) * 16, 1, to=0))
    guest = socket.create_connection(door.address)
    guest.sendall(hello(b"t" * 16, 1, to=0))
    found = door.admit(b"t" * 16, [1], _never, rank=0)
    assert found[1].getpeername() == guest.getsockname()
    strangers[0].settimeout(_LIMIT_S)
    assert strangers[0].recv(1) == b"", "the first of those that are too many has to go"
    strangers[3].setblocking(False)
    with pytest.raises(BlockingIOError):
        strangers[3].recv(1)
    door.close()
    for each in (*strangers, guest, *found.values()):
        each.close()


def test_a_rank_that_comes_twice_is_admitted_once() -> None:
    door = Door()
    twice = [socket.create_connection(door.address) for _ in range(2)]
    for each in twice:
        each.sendall(hello(b"t" * 16, 1, to=0))
    other = socket.create_connection(door.address)
    other.sendall(hello(b"t" * 16, 2, to=0))
    found = door.admit(b"t" * 16, [1, 2], _never, rank=0)
    assert {rank: sock.getpeername() for rank, sock in found.items()} == {1: twice[0].getsockname(), 2: other.getsockname()}
    twice[1].settimeout(_LIMIT_S)
    door.close()
    assert twice[1].recv(1) == b""
    assert twice[0].recv(100) == welcome(b"t" * 16, 1, to=0)
    for each in (*twice, other, *found.values()):
        each.close()


def test_a_meeting_is_called_off() -> None:
    store = _store()
    mesh = _mesh(store, rank=0, size=2)

    def look(missing: Sequence[int]) -> None:
        raise CommError(f"the members change: {missing}")

    with pytest.raises(CommError, match=r"the members change: \[1\]"):
        mesh.connect(look)
    mesh.close()


def test_a_rank_that_has_gone_is_named() -> None:
    store = _store()
    _mesh(store, rank=0, size=2).close()  # it leaves its address in the store
    mesh = _mesh(store, rank=1, size=2)
    with pytest.raises(CommError, match=r"rank 1 of 2 could not reach rank 0 at 127.0.0.1:\d+: Connection refused"):
        mesh.connect(_never)
    mesh.close()


def test_an_interface_that_there_is_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INTERFACE_VARIABLE, "nonesuch0")
    with pytest.raises(InputError, match="GLOO_SOCKET_IFNAME='nonesuch0': no IPv4 address of 'nonesuch0' was found"):
        address_of_this_host()
    monkeypatch.delenv(INTERFACE_VARIABLE)
    assert socket.inet_aton(address_of_this_host())
