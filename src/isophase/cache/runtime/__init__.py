"""What attaches a method to a model and runs it: cache layers, the attention call that they ride on, rows of tokens."""
