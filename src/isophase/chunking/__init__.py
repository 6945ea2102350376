"""Where chunks start, and the layouts that everyone else reads."""
