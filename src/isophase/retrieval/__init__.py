"""Late chunking: embeddings of chunks that have read the whole document."""

from isophase.retrieval.late.chunker import Chunk, LateChunker
from isophase.retrieval.late.encoder import Encoder
from isophase.retrieval.late.rules import Delimiters, Sentences

__all__ = ["Chunk", "Delimiters", "Encoder", "LateChunker", "Sentences"]
