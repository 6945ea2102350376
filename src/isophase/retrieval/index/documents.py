"""Documents in files: which there are, and which cannot be text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from isophase.errors import IsophaseError

LONGEST_LINE_CHARACTERS = 1_000_000
_MAGIC = {b"%PDF-": "a PDF", b"PK\x03\x04": "a ZIP archive or office document", b"\x1f\x8b": "a gzip archive",
          b"\x89PNG": "a PNG picture", b"\xff\xd8\xff": "a JPEG picture"}  # fmt: skip
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, kw_only=True)
class Document:
    """A file that was read.

    Attributes:
        path: as given, or below a folder that was given.
        digest: SHA-256 of its bytes; empty if it could not be read.
        size_bytes: length.
        text: its text; empty if skipped.
        skipped: why it is no document; empty if it is one.
    """

    path: str
    digest: str
    size_bytes: int
    text: str
    skipped: str


def list_files(places: Sequence[Path]) -> list[Path]:
    """Files among `places`, and all files below its folders but hidden ones; each once, folders in order of name.

    Raises:
        IsophaseError: for a place that does not exist, or if there is no file.
    """
    out: dict[Path, None] = {}
    for place in places:
        if place.is_dir():
            below = [
                p for p in place.rglob("*") if not any(part.startswith(".") for part in p.relative_to(place).parts)
            ]
            out |= dict.fromkeys(sorted(p for p in below if p.is_file()))
        elif place.exists():
            out[place] = None
        else:
            raise IsophaseError(f"{str(place)!r} does not exist.", "Give text files, or folders of them.")
    if not out:
        raise IsophaseError("there are no files in the folders given.", "Give text files, or folders of them.")
    return list(out)


def read_document(path: Path) -> Document:
    """Read a file as UTF-8 text, or say why it is none. Line ends stay as they are."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        return Document(path=str(path), digest="", size_bytes=0, text="", skipped=f"cannot be read: {error.strerror}")
    reason, text = _why_not(raw), ""
    if not reason:
        text = raw.decode("utf-8").removeprefix("\ufeff")
    return Document(
        path=str(path), digest=sha256(raw).hexdigest(), size_bytes=len(raw), text=text, skipped=reason
    )  # fmt: skip


def _why_not(raw: bytes) -> str:
    """Why bytes are no text to embed; empty if they are."""
    kind = next((name for magic, name in _MAGIC.items() if raw.startswith(magic)), None)
    if kind is not None:
        return f"is {kind}, not text: convert it first"
    if raw.startswith(_UTF16):
        return "is UTF-16, not UTF-8: convert it first"
    if (place := raw.find(b"\0")) >= 0:
        return f"holds a NUL byte at {place}: not text"
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"is not UTF-8 (byte {error.start}): convert it first"
    if not text.strip().strip("\ufeff"):
        return "is empty"
    if (longest := max(map(len, text.split("\n")))) > LONGEST_LINE_CHARACTERS:
        return (
            f"has a line of {longest} characters, more than {LONGEST_LINE_CHARACTERS}: data, not text; break its lines"
        )
    return ""
