"""Whole files or none: temporary file, fsync, rename."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, data: str | bytes) -> None:
    """Write `data` to `path` so that a reader, or a crash, sees the old file or the new one.

    Args:
        path: destination; its folder must exist.
        data: text (written as UTF-8) or bytes.

    Raises:
        OSError: as from the file system; the old file is then untouched.
    """
    raw = data.encode() if isinstance(data, str) else data
    # One writer a folder (runs are locked), so a fixed name is safe and leaves no litter behind.
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
