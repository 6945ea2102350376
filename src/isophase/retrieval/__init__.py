"""Late chunking: embeddings of chunks that have read the whole document."""

from isophase.retrieval.encoder import Encoder
from isophase.retrieval.late import Chunk, LateChunker
from isophase.retrieval.rules import Delimiters, Sentences

__all__ = ["Chunk", "Delimiters", "Encoder", "LateChunker", "Sentences"]
