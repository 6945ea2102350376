"""A transformers model whose prompts are read sparsely."""

from __future__ import annotations

from typing import Any

import torch

from isophase.errors import IsophaseError
from isophase.prefill import BlockSparse, PatternFile, parse_patterns, sparse_prefill
from isophase.targets.modified import ModifiedTarget
from isophase.targets.strides import Grid

# Shorter prompts hold nothing that could be left out.
_THRESHOLD_TOKENS = 256
_LENGTH_TOKENS = 1024


class SparseTarget(ModifiedTarget):
    """Reads every prompt whole and sparsely, whether that pays or not: what it does to answers is the question.

    Args:
        path: safetensors folder or hub id.
        patterns: `auto`, a pattern such as `block_sparse(windows=8)`, or a file of `isophase prefill search`.
        **kwargs: as for `HuggingFaceTarget`.

    Raises:
        IsophaseError: if the model, its tokenizer or the patterns cannot be used.
    """

    def __init__(self, path: str, *, patterns: str, **kwargs: Any) -> None:
        call = f"prefill({patterns})"
        super().__init__(path, call=call, fact="prefill", told=call, **kwargs)
        self.patterns = parse_patterns(patterns)
        chosen = self.patterns
        if isinstance(chosen, BlockSparse) and chosen.overlap == 1:
            stride, setting = chosen.window_tokens, "window_tokens of block_sparse"
            self.added_grids = [Grid(stride_tokens=stride, kind="selector", setting=setting)]
        limit = self.max_length_tokens or _LENGTH_TOKENS
        if (self.defaults.length_tokens or 0) < _LENGTH_TOKENS:
            self.defaults = self.defaults.model_copy(update={"length_tokens": min(_LENGTH_TOKENS, limit)})

    @property
    def identity(self) -> str:
        """The patterns with all their sizes, those of a file included."""
        return self.patterns.model_dump_json() if isinstance(self.patterns, PatternFile) else repr(self.patterns)

    def _forward(self, ids: torch.Tensor, keep: int, *, use_cache: bool = False, **kwargs: Any) -> Any:
        try:
            with sparse_prefill(self.model, self.patterns, threshold_tokens=_THRESHOLD_TOKENS):
                return super()._forward(ids, keep, use_cache=use_cache, **kwargs)
        except ValueError as error:
            raise IsophaseError(f"{self.name}: {error}.") from error
