"""An index on disk: documents in, chunks out, questions to it."""
