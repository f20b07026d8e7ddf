"""The durable record of a run: its events as JSON lines under `<storage>/<run>/`. Written by the controller,
read by the command line and reports.

On a file system lines are appended to `events.jsonl`. Object stores cannot append: there each batch is an object
of its own, `events-<number>-<incarnation>.jsonl`; names sort in the order of writing, and a controller that was
replaced never overwrites what its successor wrote. Blocking: the controller calls `flush` in a side thread.
Imports neither ray nor torch.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.errors import ConfigError
from everstep.orchestrator.events import Event, RunStarted, parse

_FILE = "events.jsonl"
_OBJECT = re.compile(r"events-(\d{8})-\d+\.jsonl")


@dataclass(frozen=True, slots=True)
class History:
    """What a log holds."""

    events: tuple[Event, ...]
    damaged: int
    """Lines that could not be read, such as the last one of a writer that was killed."""

    def last_run(self) -> tuple[Event, ...]:
        """The events since the name was last started anew."""
        starts = [n for n, event in enumerate(self.events) if isinstance(event, RunStarted)]
        return self.events[starts[-1] :] if starts else self.events


class EventLog:
    """Appends a run's events in batches. One writer per run and incarnation.

    `add` only remembers; `flush` writes all that is remembered. When it fails it raises the store's error (OSError
    or what the store's library has) and keeps what is not written yet for the next flush; no line is written twice.
    `add` may be called while another thread is in `flush`; only one thread at a time may be in `flush`.
    """

    def __init__(
        self, storage: str, run: str, *, incarnation: int = 1, options: Mapping[str, Any] | None = None
    ) -> None:
        """`storage`: absolute path or fsspec URL. `options`: for its filesystem. Touches nothing yet."""
        self._fs, self._folder = _place(storage, run, options)
        self._incarnation = incarnation
        self._added: deque[bytes] = deque()
        self._pending = bytearray()  # taken over by flush and not yet written
        self._next_object: int | None = None
        self._opened = False

    def add(self, *events: Event) -> None:
        """Remembers events for the next flush."""
        self._added.extend(event.to_json().encode() + b"\n" for event in events)

    def flush(self) -> None:
        """Writes what is remembered. Raises the store's error."""
        while self._added:
            self._pending += self._added.popleft()
        if self._pending and _is_file_system(self._fs):
            self._append()
        elif self._pending:
            self._put()

    def _append(self) -> None:
        path = Path(self._folder, _FILE)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered, so that after an error it is known to the byte what was written.
        with path.open("ab+", buffering=0) as file:
            if not self._opened:
                self._pending[:0] = _closing(file)
                self._opened = True
            while self._pending:
                written = file.write(self._pending)
                del self._pending[:written]
            os.fsync(file.fileno())

    def _put(self) -> None:
        if self._next_object is None:
            numbers = [
                int(match[1]) for name in _names(self._fs, self._folder) if (match := _OBJECT.fullmatch(name))
            ]
            self._next_object = max(numbers, default=0) + 1
        batch = bytes(self._pending)
        name = f"events-{self._next_object:08d}-{self._incarnation}.jsonl"
        # After a lost answer the same name is written again, with the same lines and perhaps more.
        self._fs.pipe_file(f"{self._folder}/{name}", batch)
        self._next_object += 1
        del self._pending[: len(batch)]


def check_storage(storage: str, run: str, options: Mapping[str, Any] | None = None) -> None:
    """Raises ConfigError when a run could not keep its events there, before anything is started."""
    try:
        fs, folder = _place(storage, run, options)
        if _is_file_system(fs):
            Path(folder).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        else:
            fs.pipe_file(f"{folder}/writable", b"")
            fs.rm_file(f"{folder}/writable")
    except Exception as error:  # each store has errors of its own, and all of them mean the same here
        raise ConfigError(
            f"storage = {storage!r}: nothing can be written there ({type(error).__name__}: {error}). Give an absolute path "
            "that all machines see, or a URL with its credentials in the environment, in RunConfig.storage or EVERSTEP_STORAGE"
        ) from error


def read_history(storage: str, run: str) -> History:
    """Every event of a run in the order of writing. Empty when there is none; raises the store's error."""
    fs, folder = _place(storage, run)
    names = sorted(name for name in _names(fs, folder) if name == _FILE or _OBJECT.fullmatch(name))
    texts = (fs.cat_file(f"{folder}/{name}").decode("utf-8", "replace") for name in names)
    return _parse_all(line for text in texts for line in text.split("\n"))


def _parse_all(lines: Iterable[str]) -> History:
    events: list[Event] = []
    damaged = 0
    for line in lines:
        if not line.strip():
            continue
        try:
            events.append(parse(line))
        except ValueError:
            damaged += 1
    return History(tuple(events), damaged)


def _place(storage: str, run: str, options: Mapping[str, Any] | None = None) -> tuple[Any, str]:
    import fsspec

    fs, root = fsspec.core.url_to_fs(storage, **(options or {}))
    return fs, f"{root.rstrip('/')}/{run}"


def _names(fs: Any, folder: str) -> list[str]:
    fs.invalidate_cache()
    if not fs.exists(folder):
        return []
    return [path.rstrip("/").rsplit("/", 1)[-1] for path in fs.ls(folder, detail=False)]


def _is_file_system(fs: Any) -> bool:
    return "file" in ([fs.protocol] if isinstance(fs.protocol, str) else fs.protocol)


def _closing(file: Any) -> bytes:
    """A line break when the file ends within a line, as it does after a writer was killed."""
    end = file.seek(0, os.SEEK_END)
    if end == 0:
        return b""
    file.seek(end - 1)
    return b"" if file.read(1) == b"\n" else b"\n"
