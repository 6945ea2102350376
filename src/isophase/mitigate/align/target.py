"""The tokenizer and the stride that a target's texts are aligned with. Torch is not needed for most."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from isophase.errors import IsophaseError
from isophase.mitigate.align.curve import read_curve
from isophase.mitigate.align.text import LocatingTokenizer
from isophase.models import bundled_folder, bundled_names
from isophase.specs import read_spec
from isophase.targets import RemoteTarget, open_target


class AlignmentBasis(NamedTuple):
    """What a text is aligned by; an empty curve: all phases are alike, only boundaries matter."""

    tokenizer: LocatingTokenizer
    stride_tokens: int
    phase_accuracy: tuple[float, ...]


def alignment_basis(
    target: str | None, stride_tokens: int | None, curve: Path | None, tokenizer: str | None
) -> AlignmentBasis:
    """Find tokenizer, stride and curve.

    Args:
        target: spec of the model, or None.
        stride_tokens: None: the curve's length, else the finest stride of the target's configuration.
        curve: audit folder, or None.
        tokenizer: file, folder or hub id; None: the target's.

    Raises:
        IsophaseError: one of them is not to be found.
    """
    accuracy = read_curve(curve) if curve else ()
    source = tokenizer or (_tokenizer_source(target) if target else "")
    if not source:
        raise IsophaseError(
            "tokens are counted by the model's tokenizer, and none is known.",
            "Give --target, or --tokenizer with a folder, a tokenizer.json or a hub id.",
        )
    found = LocatingTokenizer(source)
    stride = stride_tokens if stride_tokens is not None else len(accuracy)
    if not stride and target:
        stride = next((grid.stride_tokens for grid in open_target(target).grids), 0)
    if not stride and stride_tokens is None:
        raise IsophaseError("no stride is known.", "Give --stride, or --curve with the folder of an audit.")
    return AlignmentBasis(found, stride, accuracy)


def _tokenizer_source(target: str) -> str:
    read = read_spec(target)
    if read.kind == "isophase" and read.place in bundled_names():
        return str(bundled_folder(read.place))
    if read.kind == "hf":
        return read.place
    opened = open_target(target)
    return opened.tokenizer_source if isinstance(opened, RemoteTarget) else ""
