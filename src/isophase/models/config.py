"""Configuration of the trainable model: a Qwen3 backbone whose cache may be compressed."""

from __future__ import annotations

from typing import Any

from transformers import Qwen3Config

from isophase.chunking import FixedGrid

_CHOICES = {
    "chunk_rule": ("fixed", "local_maximum", "threshold"),
    "chunk_score": ("hash", "ranks", "cosine", "router"),
    "grid_shift": ("none", "heads", "layers"),
    "local_memory": ("window", "tail"),
    "slot_parameters": ("offset", "series", "shared", "both"),
    "gate": ("scalar", "vector", "uniform"),
}


class CompressedQwen3Config(Qwen3Config):  # type: ignore[misc]
    """Qwen3 with, per layer, a memory of gated window sums beside an exact local window.

    With `compression_stride=None` and a fixed chunk rule the model is Qwen3 to the last parameter. Everything
    else about two models that differ only in compression is equal, which is what makes them a matched pair.

    Attributes:
        compression_window: W, tokens that one entry reads. None: no compression.
        compression_stride: S, tokens between entries, at most W. None: no compression.
        local_window: most recent tokens kept exact, the query's own included. At least 1; ignored
            without compression.
        local_memory: `window`: the last `local_window` tokens are exact; `tail`: the tokens of the unfinished
            stride (and always the query's own).
        sink_tokens: first tokens of a text that stay exact for every query, beside the entries that cover them;
            ignored without compression.
        count_bias: whether the logit of an entry is raised by log n, n the tokens of its chunk without the overlap, so
            that it weighs as much as n exact tokens with its key would; ignored without compression.
        slot_parameters: which slots of a window share gate and payload matrices: `offset` none, `series` those
            of one stride block (W must be a multiple of S), `shared` all; `both`: what all share plus, at first 0,
            what belongs to the slot, so that what is learned at one slot is known at all.
        gate: `scalar` per KV head, `vector` per channel, or `uniform` averaging.
        gate_bias: whether gates have a bias per slot.
        tied_key_value: entries' values are their keys before norm and rotary.
        post_norm: RMSNorm on entries.
        qk_norm: RMSNorm on queries and keys, as in Qwen3.
        grid_shift: where the fixed grid begins: `none`: everywhere at token 0; `heads`, `layers`: every group of
            heads, or every layer, by its share of a stride later, so that no token is at the boundary everywhere.
        chunk_rule: `fixed`: the grid; `local_maximum`: chunks start where the content says, at the largest score
            around; `threshold`: at scores above `chunk_threshold` (cosine and router). Window and stride are then
            None, offsets count from the chunk's own start, and the tokens that no visible entry covers stay
            exact beside the local window.
        chunk_score: `hash` of the token id; `ranks` of token ids, hash between equals; `cosine` of
            neighbouring embeddings; `router`: the same behind learned projections.
        chunk_ranks: rank by token id, for `ranks`.
        chunk_radius: tokens on both sides among which a start has the largest score.
        chunk_ties: whether equal ranks fall back on the hash; without, rank 0 starts nothing.
        chunk_threshold: score that a start exceeds, for the rule of that name.
        chunk_target_tokens: mean length that a router is trained toward.
        router_weight: of the loss that does so, beside the language model's.
        chunk_max_tokens: longest chunk.
        chunk_overlap: tokens before its chunk that an entry reads too.
        chunk_groups: groups of KV heads with chunks of their own (another salt of the hash, or another shift).
        chunk_salt: of the hash in the first group; the others count on from it.
        rotary_dims: channels of a head that are rotated, even; None: all, 0: no position embedding.
        embedding_range: standard deviation of the token embeddings at initialisation. None: as
            `initializer_range`.
        record_style: how prompts for this model are written (see `isophase.probes.styles`).
        **kwargs: as `transformers.Qwen3Config`.

    Raises:
        ValueError: if only one of window and stride is given, the stride exceeds the window, one of them is no
            whole number, or another setting is impossible.

    Source: Zhu et al., arXiv 2609.36322, controlled pretraining; DeepSeek V4 for the grid; Xiao et al., arXiv
    2309.17453, for sinks.
    """

    model_type = "compressed_qwen3"

    compression_window: int | None = None
    compression_stride: int | None = None
    local_window: int = 16
    local_memory: str = "window"
    sink_tokens: int = 0
    count_bias: bool = False
    slot_parameters: str = "offset"
    gate: str = "scalar"
    gate_bias: bool = True
    tied_key_value: bool = False
    post_norm: bool = False
    qk_norm: bool = True
    rotary_dims: int | None = None
    grid_shift: str = "none"
    chunk_rule: str = "fixed"
    chunk_score: str = "hash"
    chunk_ranks: list[int] | None = None
    chunk_radius: int = 4
    chunk_ties: bool = True
    chunk_threshold: float = 0.5
    chunk_target_tokens: float = 8.0
    router_weight: float = 0.03
    chunk_max_tokens: int = 16
    chunk_overlap: int = 0
    chunk_groups: int = 1
    chunk_salt: int = 0
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
        if self.compressed and self.local_window < 1:
            raise ValueError(f"local_window={self.local_window} must be at least 1 token")
        if type(self.sink_tokens) is not int or self.sink_tokens < 0:
            raise ValueError(f"sink_tokens={self.sink_tokens!r} must be a whole number of tokens, at least 0")
        if not isinstance(self.count_bias, bool):
            raise ValueError(f"count_bias={self.count_bias!r} must be true or false")
        self._check_chunks()

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

    def _check_chunks(self) -> None:
        if self.num_key_value_heads % self.chunk_groups:
            raise ValueError(f"chunk_groups={self.chunk_groups} must divide {self.num_key_value_heads} KV heads")
        if self.grid_shift != "none" and self.grid is None:
            raise ValueError(f"grid_shift={self.grid_shift!r} shifts a fixed grid, and there is none")
        if self.grid_shift == "heads" and self.chunk_groups < 2:
            raise ValueError("grid_shift='heads' needs chunk_groups of at least 2")
        if self.chunk_overlap < 0:
            raise ValueError(f"chunk_overlap={self.chunk_overlap} must be at least 0 tokens")
        if self.chunk_rule == "fixed":
            return
        if self.compression_stride is not None:
            raise ValueError(f"chunk_rule={self.chunk_rule!r} places its own chunks; leave window and stride out")
        if self.chunk_rule == "threshold" and self.chunk_score not in ("cosine", "router"):
            raise ValueError(f"chunk_rule='threshold' needs a score from 0 to 1, not chunk_score={self.chunk_score!r}")
        if self.chunk_target_tokens <= 1:
            raise ValueError(f"chunk_target_tokens={self.chunk_target_tokens} must exceed 1")
        if not 1 <= self.chunk_radius < self.chunk_max_tokens:
            raise ValueError(
                f"chunk_radius={self.chunk_radius} must be at least 1 and below "
                f"chunk_max_tokens={self.chunk_max_tokens}"
            )
        if (self.chunk_score == "ranks") != (self.chunk_ranks is not None):
            raise ValueError("chunk_score='ranks' and chunk_ranks belong together: give both, or neither")
        if self.slot_parameters == "series":
            raise ValueError("slot_parameters='series' needs a fixed grid")

    @property
    def compressed(self) -> bool:
        """Whether there is a compressed memory at all."""
        return self.grid is not None or self.chunk_rule != "fixed"

    @property
    def window_slots(self) -> int:
        """Slots of a window: W of the grid, else the longest chunk and the overlap."""
        if self.compression_window is not None:
            return self.compression_window
        return self.chunk_max_tokens + self.chunk_overlap

    @property
    def overlap_tokens(self) -> int:
        """Slots of a window that reach back before its chunk."""
        grid = self.grid
        return grid.overlap_tokens if grid is not None else self.chunk_overlap

    @property
    def open_tokens(self) -> int:
        """Most tokens, the newest included, that lie in no entry yet, with the overlap that their entry reads."""
        if self.grid is not None:
            return self.grid.stride_tokens - 1 + self.overlap_tokens
        return self.chunk_max_tokens + self._lookahead + self.chunk_overlap

    @property
    def _lookahead(self) -> int:
        """Tokens after which a start is known."""
        return self.chunk_radius if self.chunk_rule == "local_maximum" else 0

    @property
    def exact_tokens(self) -> int:
        """Most exact tokens that a query can read beside entries and sinks, its own included."""
        if self.chunk_rule != "fixed":
            return max(self.local_window, self.chunk_max_tokens + self._lookahead + 1)
        grid = self.grid
        return grid.stride_tokens if grid is not None and self.local_memory == "tail" else self.local_window

    @property
    def grid(self) -> FixedGrid | None:
        """The fixed compression grid, or None without one."""
        if self.compression_window is None or self.compression_stride is None:
            return None
        return FixedGrid(window_tokens=self.compression_window, stride_tokens=self.compression_stride)
