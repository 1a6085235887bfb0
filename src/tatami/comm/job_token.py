"""The secret by which the ranks of one job know each other, where their launcher can give them one."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tatami.errors import InputError

TOKEN_VARIABLE = "TATAMI_TOKEN"
"""The variable with a token that all ranks of a job have; `tatami run` sets it."""
_SHORTEST = 16
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def job_token(environ: Mapping[str, str]) -> bytes:
    """`TATAMI_TOKEN`; else the token of this user where all ranks share this host; else empty, which every process knows.

    Only what the launcher of this very rank has set decides: what stands in the store could be a stranger's, who would choose
    the empty token.

    Raises:
        InputError: the token is too short, or its file could be another user's.
    """
    if (token := environ.get(TOKEN_VARIABLE)) is not None:
        if len(token) < _SHORTEST:
            raise InputError(
                f"{TOKEN_VARIABLE} has {len(token)} characters, which can be guessed; give all ranks the same {_SHORTEST} or "
                f"more, as by {TOKEN_VARIABLE}=$(openssl rand -hex 16)"
            )
        return token.encode()
    if "LOCAL_WORLD_SIZE" in environ:
        is_local = environ["LOCAL_WORLD_SIZE"] == environ.get("WORLD_SIZE")
    else:
        is_local = environ.get("MASTER_ADDR") in _LOOPBACK
    return _token_of_this_user() if is_local else b""


def new_job_token() -> str:
    """A random one."""
    return secrets.token_hex(_SHORTEST)


def _token_of_this_user() -> bytes:
    """The content of a file that only this user can read, made by the first rank that asks for it."""
    folder = Path(tempfile.gettempdir()) / f"tatami-{os.geteuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if status.st_uid != os.geteuid() or (status.st_mode & 0o170077) != 0o040000:
        raise InputError(
            f"{folder} must be a folder that only user {os.geteuid()} can enter, and is one of user {status.st_uid} with mode "
            f"{status.st_mode & 0o7777:04o}: the token of the ranks would not be secret; remove it, or set {TOKEN_VARIABLE}"
        )
    path = folder / "token"
    with suppress(FileNotFoundError):
        return path.read_bytes()
    with tempfile.NamedTemporaryFile(dir=folder) as part:  # only its owner can read it
        part.write(new_job_token().encode())
        part.flush()
        with suppress(FileExistsError):  # another rank was faster; a link appears whole or not at all
            path.hardlink_to(part.name)
    return path.read_bytes()
