"""What a compressed memory costs: entries for every token, and exact tokens, counted on real prompts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from pydantic import BaseModel, ConfigDict, Field

from isophase.models.chunks import ChunkReader
from isophase.models.config import CompressedQwen3Config
from isophase.probes.prompt import Prompt


class MemoryUse(BaseModel):
    """Mean over prompts, at their last token, over layers and KV heads."""

    model_config = ConfigDict(frozen=True)

    tokens_per_entry: float | None = Field(description="tokens that visible entries cover, per entry; null: none")
    exact_tokens: float = Field(description="exact tokens that the last token reads, its own included")
    parameters: int


def memory_use(model: torch.nn.Module, prompts: Iterable[Prompt]) -> MemoryUse:
    """Count entries and exact tokens of a model of ours.

    Args:
        model: a `CompressedQwen3ForCausalLM`.
        prompts: what it reads.

    Raises:
        TypeError: for a model of another kind.
    """
    config = model.config
    if not isinstance(config, CompressedQwen3Config):
        raise TypeError(f"the memory of a {type(config).__name__} cannot be counted")
    parameters = sum(p.numel() for p in model.parameters())
    covered = entries = exact = 0.0
    count = 0
    for prompt in prompts:
        ids = torch.from_numpy(prompt.ids).long()[None]
        count += 1
        if not config.compressed:
            exact += ids.shape[1]
            continue
        with torch.no_grad():
            layers, _ = ChunkReader(config).read(ids, model.get_input_embeddings()(ids), None)
        last = ids.shape[1] - 1
        for chunks in layers:
            for group, layout in enumerate(chunks.layouts):
                share = 1 / (len(layers) * len(chunks.layouts))
                seen = layout.close_BE[0] <= last
                entries += share * float(seen.sum())
                covered += share * float(layout.length_BE[0][seen].sum())
                uncovered = last + 1 - int(chunks.uncovered_BGT[0, group, last])
                fixed = config.chunk_rule == "fixed" and config.local_memory == "window"
                near = config.local_window if config.local_memory == "window" else 1
                exact += share * (near if fixed else max(near, uncovered))
    return MemoryUse(
        tokens_per_entry=round(covered / entries, 3) if entries else None,
        exact_tokens=round(exact / max(count, 1), 3),
        parameters=parameters,
    )
