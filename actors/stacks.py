"""Python stacks of a hung or slow process, as text. Used by the control thread."""

from __future__ import annotations

import contextlib
import faulthandler
import tempfile


def stacks() -> str:
    """Python stacks of all threads of this process."""
    with tempfile.TemporaryFile(mode="w+") as file:
        with contextlib.suppress(RuntimeError):
            faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        return file.read()
