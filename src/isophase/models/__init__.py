"""Trainable causal language models with a compressed memory."""
