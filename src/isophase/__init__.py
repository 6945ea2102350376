"""isophase measures, explains and fixes phase sensitivity: what chunked KV-cache compression loses in silence."""

__version__ = "0.1.0"
