"""The one place that knows how transformers' releases differ (5.17 to newest)."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import Qwen3Model

# transformers 5.24 renamed the argument, the model input and the output field.
CACHE_ARGUMENT = "cache" if "cache" in inspect.signature(Qwen3Model.forward).parameters else "past_key_values"


def cache_argument(cache: Any) -> dict[str, Any]:
    """Keyword under which this release of transformers takes a cache."""
    return {CACHE_ARGUMENT: cache}


def cache_of(outputs: Any) -> Any:
    """The cache that a model returned."""
    return getattr(outputs, CACHE_ARGUMENT)
