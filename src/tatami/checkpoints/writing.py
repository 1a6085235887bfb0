"""What a rank writes of a checkpoint: in a thread, while the run goes on."""

from __future__ import annotations

import threading
from pathlib import Path

from tatami.checkpoints.files import ManifestEntry, describe, file_name
from tatami.errors import InputError
from tatami.outputs import write_bytes


class Writing:
    """Begins to write when it is made.

    Args:
        folder: of the checkpoint.
        step: its step.
        name: of the member that this rank writes.
        data: what it writes; None: nothing.

    Attributes:
        member: what was written, when `wait` has returned; None where nothing was.
        written: the files of this rank, whole or not.
    """

    def __init__(self, folder: Path, step: int, name: str, data: bytes | None) -> None:
        self.folder, self.step = folder, step
        self.data = data
        self.member: ManifestEntry | None = None
        self.problem: Exception | None = None
        self.written: list[Path] = []
        self._name = name
        self._thread = threading.Thread(target=self._write, name=f"checkpoint of step {step}")
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        """
        Raises:
            OSError, InputError: it could not be written.
        """
        self._thread.join()
        if self.problem is not None:
            raise self.problem

    def _write(self) -> None:
        if self.data is None:
            return
        try:
            path = self.folder / file_name(self._name)
            self.written.append(path)
            write_bytes(path, self.data, force=True)
            self.member = describe(self._name, self.data)
        except (OSError, InputError) as error:
            self.problem = error
