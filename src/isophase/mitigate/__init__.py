"""Remedies for models that are already deployed."""
