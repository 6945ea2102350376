"""A transformers model whose prompts are read sparsely."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import torch

from isophase.errors import IsophaseError
from isophase.prefill import BlockSparse, PatternFile, parse_patterns, sparse_prefill
from isophase.probes.prompt import Prompt
from isophase.targets.huggingface import HuggingFaceTarget
from isophase.targets.strides import Grid

# Shorter prompts hold nothing that could be left out.
_THRESHOLD_TOKENS = 256
_LENGTH_TOKENS = 1024


class SparseTarget(HuggingFaceTarget):
    """Reads every prompt whole and sparsely, whether that pays or not: what it does to answers is the question.

    Args:
        path: safetensors folder or hub id.
        patterns: `auto`, a pattern such as `block_sparse(windows=8)`, or a file of `isophase prefill search`.
        **kwargs: as for `HuggingFaceTarget`.

    Raises:
        IsophaseError: if the model, its tokenizer or the patterns cannot be used.
    """

    def __init__(self, path: str, *, patterns: str, **kwargs: Any) -> None:
        super().__init__(path, **kwargs)
        self.name = f"hf:{path}|prefill({patterns})"
        self.patterns = parse_patterns(patterns)
        limit = self.max_length_tokens or _LENGTH_TOKENS
        if (self.defaults.length_tokens or 0) < _LENGTH_TOKENS:
            self.defaults = self.defaults.model_copy(update={"length_tokens": min(_LENGTH_TOKENS, limit)})

    @property
    def grids(self) -> list[Grid]:
        """The grid of blocks that do not overlap, then those of the model."""
        blocks = getattr(self, "patterns", None)
        own = []
        if isinstance(blocks, BlockSparse) and blocks.overlap == 1:
            own = [Grid(stride_tokens=blocks.window_tokens, kind="selector", setting="window_tokens of block_sparse")]
        return own + super().grids

    def fingerprint(self) -> str:
        """Digest of the model and the patterns."""
        written = self.patterns.model_dump_json() if isinstance(self.patterns, PatternFile) else repr(self.patterns)
        return sha256(f"{super().fingerprint()} {written}".encode()).hexdigest()[:16]

    def describe(self) -> dict[str, Any]:
        """Facts for the manifest."""
        return {**super().describe(), "prefill": self.name.partition("|")[2]}

    def _may_share(self, group: list[Prompt]) -> bool:
        """Never: what is read of a common beginning depends on how each prompt ends."""
        self._shares_prefix = False
        return False

    def _forward(self, ids: torch.Tensor, keep: int, *, use_cache: bool = False, **kwargs: Any) -> Any:
        try:
            with sparse_prefill(self.model, self.patterns, threshold_tokens=_THRESHOLD_TOKENS):
                return super()._forward(ids, keep, use_cache=use_cache, **kwargs)
        except ValueError as error:
            raise IsophaseError(f"{self.name}: {error}.") from error
