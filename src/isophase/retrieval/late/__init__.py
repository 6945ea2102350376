"""Late chunking: a document is read once, and chunks are means of its token vectors."""
