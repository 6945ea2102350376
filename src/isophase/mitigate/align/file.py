"""Aligned files, and the record beside each that gives the original back, byte for byte."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from isophase import __version__
from isophase.atomic import write_atomically
from isophase.errors import IsophaseError
from isophase.mitigate.align.text import AlignedText, Edit, revert

RECORD_SUFFIX = ".align.json"
_SCHEMA_VERSION = 1


class AlignRecord(BaseModel):
    """What was inserted into a file.

    Attributes:
        schema_version: of this record.
        isophase_version: that wrote it.
        format: how the file was read.
        stride_tokens: that it was aligned to.
        added_tokens: as the tokenizer counts.
        edits: neutral texts, and the characters of the original that they go before.
        original_sha256, aligned_sha256: of both files.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = _SCHEMA_VERSION
    isophase_version: str
    format: str
    stride_tokens: int
    added_tokens: int
    edits: tuple[Edit, ...]
    original_sha256: str
    aligned_sha256: str


def read_text(path: Path) -> str:
    """A file's text, its line ends as they are.

    Raises:
        IsophaseError: it cannot be read, or is no UTF-8.
    """
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise IsophaseError(f"cannot read {str(path)!r}: {error.strerror}.", "Check the path.") from None
    except UnicodeDecodeError as error:
        raise IsophaseError(f"{str(path)!r} is no UTF-8 (byte {error.start}).", "Convert it first.") from None


def aligned_path(path: Path) -> Path:
    """Where the aligned form of a file goes: `notes.txt` to `notes.aligned.txt`."""
    return path.with_name(f"{path.stem}.aligned{path.suffix}")


def record_path(path: Path) -> Path:
    """Where the record of an aligned file lies."""
    return path.with_name(path.name + RECORD_SUFFIX)


def write_aligned(out: Path, original: str, found: AlignedText, form: str, stride_tokens: int) -> None:
    """Write an aligned file and its record, the record first: the text is never without it.

    Raises:
        IsophaseError: it cannot be written, or `out` is aligned already.
    """
    if record_path(out).exists() and _digest(original) != _read_record(out).original_sha256:
        raise IsophaseError(
            f"{str(out)!r} is an aligned file already.", "Undo it first, with --undo, or choose another --out."
        )
    record = AlignRecord(
        isophase_version=__version__,
        format=form,
        stride_tokens=stride_tokens,
        added_tokens=found.added_tokens,
        edits=found.edits,
        original_sha256=_digest(original),
        aligned_sha256=_digest(found.text),
    )
    try:
        write_atomically(record_path(out).resolve(), record.model_dump_json(indent=2) + "\n")
        write_atomically(out.resolve(), found.text)
    except OSError as error:
        raise IsophaseError(f"cannot write {str(out)!r}: {error.strerror}.", "Choose another --out.") from None


def undo(path: Path, out: Path) -> int:
    """Give the original back.

    Args:
        path: of an aligned file, its record beside it.
        out: where the original goes; the same path puts it in its place and removes the record.

    Returns:
        Tokens that are gone.

    Raises:
        IsophaseError: there is no record, or the file was changed since.
    """
    record = _read_record(path)
    text = read_text(path)
    if _digest(text) == record.original_sha256:
        original = text  # broken off behind the record
    elif _digest(text) == record.aligned_sha256:
        original = revert(text, record.edits)
    else:
        raise IsophaseError(f"{str(path)!r} was changed since it was aligned.", "Undo it before you edit it.")
    if _digest(original) != record.original_sha256:
        raise IsophaseError(f"the record of {str(path)!r} does not fit it.", "Take the original from elsewhere.")
    try:
        write_atomically(out.resolve(), original)
        if out.resolve() == path.resolve():
            record_path(path).unlink()
    except OSError as error:
        raise IsophaseError(f"cannot write {str(out)!r}: {error.strerror}.", "Choose another --out.") from None
    return record.added_tokens


def _read_record(path: Path) -> AlignRecord:
    place = record_path(path)
    try:
        return AlignRecord.model_validate(json.loads(place.read_text(encoding="utf-8")))
    except OSError:
        raise IsophaseError(
            f"{str(path)!r} has no record {place.name!r} beside it.", "Give the aligned file, where it was written."
        ) from None
    except (ValueError, ValidationError):
        raise IsophaseError(
            f"{str(place)!r} is no record of an alignment.", "Take the original from elsewhere."
        ) from None


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()
