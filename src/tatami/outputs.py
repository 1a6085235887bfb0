"""Output files: a reader sees the old file or the new one, never a part, also after the machine lost its power.

Nothing is replaced unasked, and nothing but regular files is ever replaced. A file is written as `.tatami-*.part` in its own
folder, reaches the disk, and takes its name in one step. Its writer holds a lock on the part. A part without a lock is what a
process that died left behind, and the next save in that folder removes it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from tatami.errors import InputError, OutputExistsError, shortened

_PREFIX, _SUFFIX = ".tatami-", ".part"
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
}


def check_output(path: Path | str, *, force: bool) -> None:
    """Check an output file before the work that it is for; writes nothing.

    Raises:
        OutputExistsError: `path` exists and `force` was not given.
        InputError: `path` is not a regular file, or cannot be written where it is.
    """
    path = Path(path)
    if _refuse(path, force=force) is None:
        _check_room(path)
    else:
        _check_writable(Path(os.path.realpath(path)).parent, of=path)


def check_folder(path: Path | str) -> None:
    """Check a folder for outputs before the work that it is for; it need not be there yet, and is not made.

    Raises:
        InputError: `path` is something else, or files cannot be written there.
    """
    path = Path(path)
    if (mode := _mode(path)) is None:
        _check_room(path)
    elif not stat.S_ISDIR(mode):
        raise InputError(f"{path} is {kind_of(mode)}, but a folder is needed; choose another name")
    else:
        _check_writable(path, of=path)


def make_folder(path: Path | str) -> None:
    """Make a folder for outputs, and those above it. Raises as `check_folder`."""
    check_folder(path)
    Path(path).mkdir(parents=True, exist_ok=True)


def kind_of(mode: int) -> str:
    """What a file of this `st_mode` is, in words."""
    return _KINDS.get(stat.S_IFMT(mode), "a file" if stat.S_ISREG(mode) else "no file")


def free_name(path: Path | str) -> Path:
    """`path` if there is nothing of that name; else the first of `name-1.end`, `name-2.end` ... that is free."""
    path = Path(path)
    names = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in count(1))
    return path if not os.path.lexists(path) else next(name for name in names if not os.path.lexists(name))


def write_text(path: Path | str, text: str, *, force: bool = False) -> None:
    """Write `text` as UTF-8. Raises as `replacing`."""
    write_bytes(path, text.encode(), force=force)


def write_bytes(path: Path | str, data: bytes, *, force: bool = False) -> None:
    """Write `data`. Raises as `replacing`."""
    with replacing(path, force=force) as part:
        part.write_bytes(data)


@contextmanager
def replacing(path: Path | str, *, force: bool = False) -> Iterator[Path]:
    """Make the folders above `path`, and give a name to write to: when the block ends well, that file becomes `path`.

    A new file has the permissions that the umask leaves; one that is replaced keeps its own. A link goes on to point to what it
    points to, and that is replaced.

    Raises:
        OutputExistsError: `path` exists and `force` was not given; also where it came to be in the meantime.
        InputError: `path` is not a regular file.
        OSError: the file cannot be written, for example because the disk is full; what was there before is untouched.
    """
    path = Path(path)
    _refuse(path, force=force)
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_parts(target.parent)
    part, handle = _new_part(target.parent)
    try:
        yield part
        with suppress(FileNotFoundError):
            part.chmod(stat.S_IMODE(target.stat().st_mode))
        _sync(part)
        if force:
            os.replace(part, target)
        else:
            _take_free_name(part, target)
    finally:
        with suppress(OSError):
            part.unlink()  # where it has taken its name, there is none
        os.close(handle)
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` last, too; not every file system can."""
    with suppress(OSError):
        _sync(folder)


def _refuse(path: Path, *, force: bool) -> int | None:
    """Raise where there is something that must stay; returns the `st_mode` of what is there, None where nothing is."""
    mode = _mode(path)
    if mode is not None and not stat.S_ISREG(mode):
        raise InputError(f"{path} is {kind_of(mode)}, and only a regular file can be replaced; choose another name")
    if mode is not None and not force:
        raise OutputExistsError(f"{path} exists already; choose another name, or overwrite it with force (--force)")
    return mode


def _mode(path: Path) -> int | None:
    """The `st_mode` of what is there, behind links; None where nothing is."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _cannot_be_written(path, error) from None
    try:
        return os.stat(path).st_mode
    except OSError as error:
        raise InputError(
            f"{path} is a link to what is not there ({error.strerror}); remove it, or choose another name"
        ) from None


def _check_room(path: Path) -> None:
    """Whether `path`, which is not there, could be made."""
    missing = [path.absolute()]
    while not os.path.lexists(missing[-1].parent):
        missing.append(missing[-1].parent)
    above = missing[-1].parent
    for each in missing:  # a name may be too long although no folder of it is there yet
        try:
            os.lstat(above / each.name)
        except FileNotFoundError:
            pass  # What is wanted: the name is free, and short enough for the file system.
        except OSError as error:
            raise _cannot_be_written(path, error) from None
    if not above.is_dir():
        raise InputError(f"{path} cannot be written: {above} is not a folder; choose another name")
    _check_writable(above, of=path)


def _check_writable(folder: Path, *, of: Path) -> None:
    """Whether files can be made in `folder`: one without a name is."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass  # That it could be made is the answer.
    except OSError as error:
        raise _cannot_be_written(of, error) from None


def _cannot_be_written(path: Path, error: OSError | ValueError) -> InputError:
    reason = error.strerror if isinstance(error, OSError) else error
    return InputError(f"{shortened(str(path))} cannot be written: {reason}; choose another name")


def _new_part(folder: Path) -> tuple[Path, int]:
    """A new file that no other process has, and its handle, which holds a lock until it is closed."""
    while True:
        part = folder / f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}"
        handle = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with suppress(OSError):  # a file system without locks: there nothing is ever removed, either
            fcntl.flock(handle, fcntl.LOCK_EX)
        # Between the making and the lock, another process may have taken the file for an orphan.
        if part.exists():
            return part, handle
        os.close(handle)


def _remove_parts(folder: Path) -> None:
    """Remove what processes that died while writing have left here."""
    for part in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        with suppress(OSError):
            handle = os.open(part, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails where a process still writes it
                part.unlink()
            finally:
                os.close(handle)


def _take_free_name(part: Path, target: Path) -> None:
    """Give the file the name `target` unless another process was quicker."""
    try:
        os.link(part, target)  # unlike a rename, it fails where there is something
    except FileExistsError:
        _refuse(target, force=False)
        raise
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        _refuse(target, force=False)  # a file system without hard links
        os.replace(part, target)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
