"""Aligned prompts: records start at strong phases, and the change can be undone byte for byte."""
