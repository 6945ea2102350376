"""Trainable causal language models with a compressed memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isophase.lazy import lazily

if TYPE_CHECKING:
    from isophase.models.attention import Rotary
    from isophase.models.bundled import TrainingRecord, bundled_folder, bundled_names, memory_words, training_record
    from isophase.models.chunks import ChunkReader
    from isophase.models.compat import cache_argument, cache_of
    from isophase.models.compressor import WindowBranch, WindowCompressor
    from isophase.models.config import CompressedQwen3Config
    from isophase.models.qwen3 import CompressedQwen3ForCausalLM
    from isophase.models.router import BoundaryRouter

__all__ = [
    "BoundaryRouter",
    "ChunkReader",
    "CompressedQwen3Config",
    "CompressedQwen3ForCausalLM",
    "Rotary",
    "TrainingRecord",
    "WindowBranch",
    "WindowCompressor",
    "bundled_folder",
    "bundled_names",
    "cache_argument",
    "cache_of",
    "memory_words",
    "training_record",
]

__getattr__, __dir__ = lazily(__name__, __file__)
