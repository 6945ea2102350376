"""Matched training runs and the mechanism behind them."""
