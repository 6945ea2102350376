"""Configuration of the trainable model: a Qwen3 backbone whose cache may be compressed."""

from __future__ import annotations

from typing import Any

from transformers import Qwen3Config

from isophase.chunking.layout import FixedGrid

_CHOICES = {
    "local_memory": ("window", "tail"),
    "slot_parameters": ("offset", "series", "shared"),
    "gate": ("scalar", "vector", "uniform"),
}


class CompressedQwen3Config(Qwen3Config):  # type: ignore[misc]
    """Qwen3 with, per layer, a memory of gated window sums beside an exact local window.

    With `compression_stride=None` the model is Qwen3 to the last parameter. Everything else about two
    models that differ only in compression is equal, which is what makes them a matched pair.

    Args:
        compression_window: W, tokens that one entry reads. None: no compression.
        compression_stride: S, tokens between entries, at most W. None: no compression.
        local_window: most recent tokens kept exact, the query's own included. At least 1; ignored
            without compression.
        local_memory: `window`: the last `local_window` tokens are exact; `tail`: the tokens of the unfinished
            stride (and always the query's own).
        slot_parameters: which slots of a window share gate and payload matrices: `offset` none, `series` those
            of one stride block (W must be a multiple of S), `shared` all.
        gate: `scalar` per KV head, `vector` per channel, or `uniform` averaging.
        gate_bias: whether gates have a bias per slot.
        tied_key_value: entries' values are their keys before norm and rotary.
        post_norm: RMSNorm on entries.
        qk_norm: RMSNorm on queries and keys, as in Qwen3.
        rotary_dims: channels of a head that are rotated, even; None: all, 0: no position embedding.
        embedding_range: standard deviation of the token embeddings at initialisation. None: as
            `initializer_range`.
        record_style: how prompts for this model are written (see `isophase.probes.styles`).
        **kwargs: as `transformers.Qwen3Config`.

    Raises:
        ValueError: if only one of window and stride is given, the stride exceeds the window, or one of
            them is no whole number.

    Source: Zhu et al., arXiv 2609.36322, controlled pretraining; DeepSeek V4 for the grid.
    """

    model_type = "compressed_qwen3"

    compression_window: int | None = None
    compression_stride: int | None = None
    local_window: int = 16
    local_memory: str = "window"
    slot_parameters: str = "offset"
    gate: str = "scalar"
    gate_bias: bool = True
    tied_key_value: bool = False
    post_norm: bool = False
    qk_norm: bool = True
    rotary_dims: int | None = None
    embedding_range: float | None = None
    record_style: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        for name in ("compression_window", "compression_stride", "local_window"):
            value = getattr(self, name)
            if not isinstance(value, int) and not (value is None and name != "local_window"):
                raise ValueError(f"{name}={value!r} must be a whole number of tokens")
        if (self.compression_window is None) != (self.compression_stride is None):
            raise ValueError(
                f"compression_window={self.compression_window} and "
                f"compression_stride={self.compression_stride}: give both, or neither for full attention"
            )
        if self.grid is not None and self.local_window < 1:
            raise ValueError(f"local_window={self.local_window} must be at least 1 token")

        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(allowed)}")
        rotary = self.rotary_dims
        if rotary is not None and (rotary < 0 or rotary % 2 or rotary > self.head_dim):
            raise ValueError(f"rotary_dims={rotary} must be even and at most head_dim={self.head_dim}")
        grid = self.grid
        if grid is not None and self.slot_parameters == "series" and grid.window_tokens % grid.stride_tokens:
            raise ValueError(
                f"slot_parameters='series' needs a window ({grid.window_tokens}) that is a multiple of the stride "
                f"({grid.stride_tokens})"
            )

    @property
    def exact_tokens(self) -> int:
        """Most exact tokens that a query can read beside the entries, its own included."""
        grid = self.grid
        return grid.stride_tokens if grid is not None and self.local_memory == "tail" else self.local_window

    @property
    def grid(self) -> FixedGrid | None:
        """The compression grid, or None for full attention."""
        if self.compression_window is None or self.compression_stride is None:
            return None
        return FixedGrid(window_tokens=self.compression_window, stride_tokens=self.compression_stride)
