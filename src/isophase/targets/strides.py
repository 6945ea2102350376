"""Where a model's configuration says on what grid its cache is compressed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A fixed grid that a model cuts its context into.

    Attributes:
        stride_tokens: S, tokens between entries.
        kind: `payload`: the entries replace tokens, information can be lost; `selector`: entries only
            choose which exact tokens are read.
        setting: where in the configuration it stands.
    """

    stride_tokens: int
    kind: Literal["payload", "selector"]
    setting: str


# model_type -> (kind, names of the settings that hold a stride). DeepSeek V4 is separate: a mapping.
_SETTINGS: dict[str, tuple[Literal["payload", "selector"], str]] = {
    "compressed_qwen3": ("payload", "compression_stride"),
    "glm5_next": ("selector", "index_kpool"),
    "qwen4_exp": ("selector", "indexer_compress_ratio"),
    "minimax_m3_vl": ("selector", "index_block_size"),
}


def grids_of(config: Any) -> list[Grid]:
    """Fixed grids of a transformers configuration, finest payload grid first; empty where none is known.

    Args:
        config: any `PretrainedConfig`; a multimodal one is searched in its text part too.
    """
    parts = [config]
    if hasattr(config, "get_text_config"):
        parts.append(config.get_text_config())
    found: dict[tuple[int, str], Grid] = {}
    for part in parts:
        model_type = getattr(part, "model_type", "")
        if model_type.startswith("deepseek_v4"):
            rates = getattr(part, "compress_rates", None) or {}
            used = set(getattr(part, "layer_types", None) or rates)
            for layer_type, rate in rates.items():
                if layer_type in used and rate > 1:
                    setting = f"compress_rates.{layer_type}"
                    found[rate, setting] = Grid(stride_tokens=rate, kind="payload", setting=setting)
        for name, (kind, setting) in _SETTINGS.items():
            stride = getattr(part, setting, None) if model_type.startswith(name) else None
            if isinstance(stride, int) and stride > 1:
                found[stride, setting] = Grid(stride_tokens=stride, kind=kind, setting=setting)
    return sorted(found.values(), key=lambda grid: (grid.kind != "payload", grid.stride_tokens))
