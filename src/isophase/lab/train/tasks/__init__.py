"""Training data: record lookup, text, and the stream that mixes them."""
