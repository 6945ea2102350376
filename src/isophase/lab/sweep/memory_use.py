"""What a compressed memory costs: entries for every token, and exact tokens, counted on real prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from pydantic import BaseModel, ConfigDict, Field

from isophase.models import BoundaryRouter, ChunkReader, CompressedQwen3Config
from isophase.probes import Prompt

Embed = Callable[[torch.Tensor], torch.Tensor]


class MemoryUse(BaseModel):
    """Mean over prompts, at their last token, over layers and KV heads."""

    model_config = ConfigDict(frozen=True)

    tokens_per_entry: float | None = Field(description="tokens that visible entries stand for, per entry; null: none")
    exact_tokens: float = Field(description="exact tokens that the last token reads, its own included")


def memory_use(
    config: CompressedQwen3Config,
    prompts: Iterable[Prompt],
    embed: Embed | None = None,
    routers: Sequence[BoundaryRouter] = (),
) -> MemoryUse:
    """Count entries and exact tokens.

    Args:
        config: of the model.
        prompts: what it reads.
        embed: its token embeddings; only rules that read states need them.
        routers: of the model, where it has some.

    Raises:
        ValueError: where the rule needs embeddings and there are none.
    """
    covered = entries = exact = 0.0
    count = 0
    reader = ChunkReader(config, routers) if config.compressed else None
    for prompt in prompts:
        ids = torch.from_numpy(prompt.ids).long()[None]
        count += 1
        if reader is None:
            exact += ids.shape[1]
            continue
        with torch.no_grad():
            layers, _ = reader.read(ids, None if embed is None else embed(ids), None)
        last = ids.shape[1] - 1
        for chunks in layers:
            for group, layout in enumerate(chunks.layouts):
                share = 1 / (len(layers) * len(chunks.layouts))
                seen_E = layout.close_BE[0] <= last
                entries += share * float(seen_E.sum())
                covered += share * float(layout.length_BE[0][seen_E].sum())
                exact += share * _exact(config, last + 1 - int(chunks.uncovered_BGT[0, group, last]), last + 1)
    return MemoryUse(
        tokens_per_entry=round(covered / entries, 3) if entries else None,
        exact_tokens=round(exact / max(count, 1), 3),
    )


def _exact(config: CompressedQwen3Config, uncovered: int, length: int) -> int:
    """Exact tokens that the last of `length` tokens reads, of which no entry covers the last `uncovered`."""
    near = min(config.local_window, length)
    if config.local_memory == "tail":
        newest = max(uncovered, 1)
    else:  # on a fixed grid the local window alone decides
        newest = near if config.chunk_rule == "fixed" else max(near, uncovered)
    return min(newest + config.sink_tokens, length)
