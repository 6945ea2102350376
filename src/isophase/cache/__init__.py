"""Compress the KV cache of an existing model: `compress(model, method)`."""

from isophase.cache.attach import OpenCache, compress
from isophase.cache.chunkkv import ChunkKV
from isophase.cache.dynamic import After, DynamicChunkKV, delimiter_rule, hash_rule
from isophase.cache.full import Full
from isophase.cache.merged import MergedChunks
from isophase.cache.method import Method
from isophase.cache.picture import draw_kept
from isophase.cache.record import Record, compressed
from isophase.cache.scene import Entries, Scene
from isophase.cache.snapkv import SnapKV
from isophase.cache.streaming import StreamingLLM
from isophase.cache.voted import VotedChunkKV
from isophase.cache.whole import CompressedCache, Kept

__all__ = [
    "After",
    "ChunkKV",
    "CompressedCache",
    "DynamicChunkKV",
    "Entries",
    "Full",
    "Kept",
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
]
