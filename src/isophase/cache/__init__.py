"""Compress the KV cache of an existing model: `compress(model, method)`."""

from isophase.cache.attach import OpenCache, compress
from isophase.cache.methods.base import Method
from isophase.cache.methods.chunkkv import ChunkKV
from isophase.cache.methods.dynamic import After, DynamicChunkKV, delimiter_rule, hash_rule
from isophase.cache.methods.full import Full
from isophase.cache.methods.melted import Melted, sharp_tokens
from isophase.cache.methods.merged import MergedChunks
from isophase.cache.methods.scene import Entries, Scene
from isophase.cache.methods.snapkv import SnapKV
from isophase.cache.methods.streaming import StreamingLLM
from isophase.cache.methods.voted import VotedChunkKV
from isophase.cache.picture import draw_kept
from isophase.cache.record import Record, compressed
from isophase.cache.runtime.whole import CompressedCache, Kept
from isophase.cache.spec import parse_method

__all__ = [
    "After",
    "ChunkKV",
    "CompressedCache",
    "DynamicChunkKV",
    "Entries",
    "Full",
    "Kept",
    "Melted",
    "MergedChunks",
    "Method",
    "OpenCache",
    "Record",
    "Scene",
    "SnapKV",
    "StreamingLLM",
    "VotedChunkKV",
    "compress",
    "compressed",
    "delimiter_rule",
    "draw_kept",
    "hash_rule",
    "parse_method",
    "sharp_tokens",
]
