"""The patterns of MInference, one file each. A pattern says how much to read; what to read is decided for each prompt.

Source: MInference 1.0, arXiv 2407.02490, section 3. Copy the nearest one to add another, and name it in `KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable

from isophase.prefill.patterns.a_shape import AShape
from isophase.prefill.patterns.block_sparse import BlockSparse
from isophase.prefill.patterns.dense import Dense
from isophase.prefill.patterns.reads import BlockReads, Reads, SlashReads
from isophase.prefill.patterns.vertical_slash import FIRST_COLUMNS, VerticalSlash

__all__ = [
    "FIRST_COLUMNS",
    "KINDS",
    "AShape",
    "BlockReads",
    "BlockSparse",
    "Dense",
    "Pattern",
    "Reads",
    "SlashReads",
    "SparsePattern",
    "VerticalSlash",
]

SparsePattern = AShape | VerticalSlash | BlockSparse
Pattern = Dense | SparsePattern
KINDS: dict[str, Callable[..., Pattern]] = {
    "dense": Dense, "a_shape": AShape, "vertical_slash": VerticalSlash, "block_sparse": BlockSparse,
}  # fmt: skip
