"""Output files: nothing is overwritten unasked, only regular files ever, nothing is half written, nothing is left behind."""

import errno
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tatami.errors import InputError, OutputExistsError
from tatami.outputs import check_folder, check_output, free_name, make_folder, replacing, write_bytes, write_text


@pytest.fixture
def umask() -> Iterator[Callable[[int], None]]:
    before = os.umask(0o022)
    yield lambda mask: (os.umask(mask), None)[1]
    os.umask(before)


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def test_a_file_and_its_folders_are_made(tmp_path: Path) -> None:
    write_text(tmp_path / "a" / "b.txt", "µ\n")
    assert (tmp_path / "a" / "b.txt").read_bytes() == b"\xc2\xb5\n"
    assert names(tmp_path / "a") == ["b.txt"]


def test_what_exists_is_kept_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "b.txt"
    write_text(path, "one")
    check_output(tmp_path / "c.txt", force=False)
    check_output(path, force=True)
    attempts: list[Callable[[], None]] = [lambda: check_output(path, force=False), lambda: write_text(path, "two")]
    for attempt in attempts:
        with pytest.raises(OutputExistsError, match=r"b.txt exists already; choose another name, or overwrite it with force"):
            attempt()
    assert path.read_text() == "one"
    write_text(path, "two", force=True)
    assert path.read_text() == "two"
    assert names(tmp_path) == ["b.txt"]


def test_a_file_that_another_process_wrote_in_the_meantime_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "b.txt"
    link = os.link

    def slower(source: Path, target: Path) -> None:
        path.write_text("quicker")
        link(source, target)

    monkeypatch.setattr(os, "link", slower)
    with pytest.raises(OutputExistsError, match="exists already"):
        write_text(path, "late")
    assert path.read_text() == "quicker"
    assert names(tmp_path) == ["b.txt"]


def test_a_file_system_without_hard_links_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_source: Path, _target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", none)
    write_text(tmp_path / "b.txt", "one")
    assert (tmp_path / "b.txt").read_text() == "one"
    assert names(tmp_path) == ["b.txt"]


@pytest.mark.parametrize("fails", ["replace", "fsync"])
def test_a_write_that_fails_leaves_the_old_file_and_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    path = tmp_path / "b.txt"
    write_text(path, "old")

    def full(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, fails, full)
    with pytest.raises(OSError, match="disk full"):
        write_text(path, "new", force=True)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["b.txt"]


def test_a_file_reaches_the_disk_before_it_has_its_name_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, happened = tmp_path / "b.txt", []
    fsync, replace = os.fsync, os.replace

    def synced(handle: int) -> None:
        found = os.fstat(handle)
        happened.append("folder" if stat.S_ISDIR(found.st_mode) else f"{found.st_size} bytes")
        fsync(handle)

    def replaced(source: Path, target: Path) -> None:
        happened.append(f"{target.name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    write_bytes(path, b"twelve bytes", force=True)
    assert happened == ["12 bytes", "b.txt", "folder"]


DIES = """
import os, signal, sys
from tatami import outputs
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
setattr(os, sys.argv[2], die)
outputs.write_text(sys.argv[1], "new", force=sys.argv[2] == "replace")
"""


@pytest.mark.parametrize("moment", ["fsync", "replace", "link"])
def test_what_a_killed_process_left_is_removed_by_the_next_save(tmp_path: Path, moment: str) -> None:
    done = subprocess.run([sys.executable, "-c", DIES, str(tmp_path / "b.txt"), moment], timeout=800, check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = names(tmp_path)
    assert left.startswith(".tatami-")
    assert left.endswith(".part")
    write_text(tmp_path / "another.txt", "whole")
    assert names(tmp_path) == ["another.txt"]


def test_the_part_of_a_process_that_lives_is_left_alone(tmp_path: Path) -> None:
    with replacing(tmp_path / "one.txt") as part:
        part.write_text("one")
        write_text(tmp_path / "two.txt", "two")
        assert part.read_text() == "one"
        assert not (tmp_path / "one.txt").exists()
    assert names(tmp_path) == ["one.txt", "two.txt"]
    assert (tmp_path / "one.txt").read_text() == "one"


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_new_file_obeys_the_umask_and_a_replaced_one_keeps_its_mode(
    tmp_path: Path, umask: Callable[[int], None], mask: int, mode: int
) -> None:
    path = tmp_path / "b.txt"
    umask(mask)
    write_text(path, "one")
    assert stat.S_IMODE(path.stat().st_mode) == mode
    path.chmod(0o640)
    write_text(path, "two", force=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_behind_a_link_the_file_that_it_points_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "big").mkdir()
    path, target = tmp_path / "b.txt", tmp_path / "big" / "target.txt"
    target.write_text("one")
    path.symlink_to(target)
    with pytest.raises(OutputExistsError):
        write_text(path, "two")
    write_text(path, "two", force=True)
    assert path.is_symlink()
    assert target.read_text() == "two"
    assert (names(tmp_path), names(tmp_path / "big")) == (["b.txt", "big"], ["target.txt"])


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("device", "/dev/full is a device, and only a regular file can be replaced"),
        ("directory", "there is a directory, and only a regular file"),
        ("FIFO", "there is a FIFO, and only a regular file"),
        ("socket", "there is a socket, and only a regular file"),
        ("link to a device", "there is a device, and only a regular file"),
        ("dangling link", "there is a link to what is not there"),
        ("link to itself", "there is a link to what is not there"),
    ],
)
def test_only_regular_files_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, kind: str, said: str, force: bool
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    path = Path("/dev/full") if kind == "device" else Path("there")
    if kind == "directory":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
    elif "link" in kind:
        path.symlink_to({"link to a device": "/dev/full", "dangling link": "nowhere"}.get(kind, "there"))
    before = os.lstat(path)
    attempts: list[Callable[[], None]] = [lambda: check_output(path, force=force), lambda: write_text(path, "x", force=force)]
    for attempt in attempts:
        with pytest.raises(InputError, match=said) as caught:
            attempt()
        assert not isinstance(caught.value, OutputExistsError)
    assert os.lstat(path)[:2] == before[:2]  # its mode, and its inode


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/proc/there", "/proc/there cannot be written: "),
        ("/proc/there/below", "/proc/there/below cannot be written: "),
        ("file/there", "file/there cannot be written: Not a directory"),
        ("n" * 256, r"nnn cannot be written: File name too long"),
        ("new/" + "n" * 256, r"nnn cannot be written: File name too long"),
        ("n" * 10_000_000, r"^nnn.*\.\.\.n* cannot be written: File name too long"),
        ("null\0byte", "cannot be written: embedded null byte"),
        ("", "is a directory"),
    ],
)
def test_what_cannot_be_written_is_told_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    with pytest.raises(InputError, match=said) as caught:
        check_output(path, force=True)
    assert len(str(caught.value)) < 500
    assert names(tmp_path) == ["file"]


def test_a_folder_without_permission_is_told_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*, dir: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(dir))  # root would be allowed

    monkeypatch.setattr(tempfile, "TemporaryFile", denied)
    (tmp_path / "there.txt").write_text("mine")
    checks: list[Callable[[], None]] = [
        lambda: check_output(tmp_path / "b.txt", force=False),
        lambda: check_output(tmp_path / "there.txt", force=True),
        lambda: check_folder(tmp_path),
    ]
    for check in checks:
        with pytest.raises(InputError, match="cannot be written: Permission denied; choose another name"):
            check()


def test_a_folder_for_outputs(tmp_path: Path) -> None:
    check_folder(tmp_path / "a" / "b")
    assert names(tmp_path) == []
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    assert names(tmp_path / "a") == ["b"]
    assert names(tmp_path / "a" / "b") == []
    (tmp_path / "file").write_text("mine")
    for path, said in (
        (tmp_path / "file", "file is a file, but a folder is needed"),
        (tmp_path / "file" / "a", "Not a directory"),
    ):
        with pytest.raises(InputError, match=said):
            make_folder(path)


def test_the_first_free_name(tmp_path: Path) -> None:
    path = tmp_path / "b.txt"
    assert free_name(path) == path
    path.symlink_to("nowhere")
    assert free_name(path) == tmp_path / "b-1.txt"
    write_text(tmp_path / "b-1.txt", "one")
    assert free_name(path) == tmp_path / "b-2.txt"
