"""For `prefill.py`: planted vertical-slash structure, queries and keys of a real model, and what is measured on them.

Legend: H query heads, K KV heads, T tokens, D head width.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from isophase.prefill import Geometry, Reads, attention_rows, make_plan

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
ROOT = Path(__file__).parent.parent
_WIDE_TOKENS, _SHARP = 16, 24.0


def planted(
    tokens: int, *, heads: int = 9, kv_heads: int = 3, width: int = 64, columns: int = 512, seed: int = 0
) -> Inputs:
    """Vertical-slash structure: columns, a band around the diagonal, and for each head one band far from it.

    Every token has a code that changes smoothly over 16 tokens. Queries look for their own code, which makes the near
    band; for the code of a fixed distance ago, different in every head; and for the columns of their KV head. Three
    eighths of attention or so go to the columns, the rest to the bands; what the codes have in common by chance is
    spread over all keys.
    """
    generator = torch.Generator().manual_seed(seed)
    key, query = torch.zeros(kv_heads, tokens, width), torch.zeros(heads, tokens, width)
    place = torch.arange(tokens) / _WIDE_TOKENS
    below = place.long()
    for kv_head in range(kv_heads):
        anchors = torch.randn(tokens // _WIDE_TOKENS + 2, width - 1, generator=generator)
        code = torch.lerp(anchors[below], anchors[below + 1], (place - below)[:, None])
        code = torch.nn.functional.normalize(code, dim=-1)
        chosen = torch.randperm(tokens, generator=generator)[:columns]
        key[kv_head, :, 1:] = code
        key[kv_head, chosen, 0] = 1.0
        for head in range(kv_head * heads // kv_heads, (kv_head + 1) * heads // kv_heads):
            distance = int(torch.randint(64, tokens // 2, (1,), generator=generator))
            query[head, :, 1:] = _SHARP * code
            query[head, distance:, 1:] += _SHARP * code[: tokens - distance]
            # Columns have as much weight as two bands of 16 keys, if they were read at the bands' own sharpness.
            query[head, :, 0] = 0.75 * _SHARP + math.log(2 * _WIDE_TOKENS / columns)
    return query * math.sqrt(width), key, torch.randn(kv_heads, tokens, width, generator=generator)


def text_ids(tokenizer: Any, tokens: int) -> torch.Tensor:
    """The licence, the documentation and the sources of this repository, [1, tokens]; repeated where they end."""
    pages = [ROOT / "LICENSE", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "src").rglob("*.py"))]
    words = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    ids = tokenizer(words[: 8 * tokens], return_tensors="pt")["input_ids"]
    return ids.repeat(1, math.ceil(tokens / ids.shape[1]))[:, :tokens]


@contextmanager
def captured(model: Any, layers: list[int]) -> Iterator[dict[int, Inputs]]:
    """Queries and keys of some layers of the next forward pass, rotary applied."""
    found: dict[int, Inputs] = {}

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
    ) -> Any:
        if module.layer_idx in layers:
            found[module.layer_idx] = (query[0].clone(), key[0].clone(), value[0].clone())
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **kwargs)

    AttentionInterface.register("bench_capture", attend)
    AttentionMaskInterface.register("bench_capture", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation("bench_capture")
    try:
        yield found
    finally:
        model.set_attn_implementation("sdpa")


def peak_bytes(reset: bool = False) -> int:
    """Peak resident memory of this process since the last reset; 0 where the system does not tell."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        line = next(ln for ln in Path("/proc/self/status").read_text().splitlines() if ln.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    except OSError:
        return 0


def recall_of(
    reads: list[Reads | None], query: torch.Tensor, key: torch.Tensor, geometry: Geometry, queries: int = 256
) -> tuple[list[float], list[float]]:
    """Recall on queries spread over the prompt that nothing was fitted to, and density, by head."""
    generator = torch.Generator().manual_seed(12345)
    at = torch.randint(geometry.tokens, (queries,), generator=generator).sort().values
    group = len(query) // len(key)
    recalls, densities = [], []
    for head, read in enumerate(reads):
        if read is None:
            recalls.append(1.0)
            densities.append(1.0)
            continue
        plan = make_plan([read], geometry)
        rows = attention_rows(query[head, at], key[head // group], at, query.shape[-1] ** -0.5)
        recalls.append(float((rows * plan.rows(0, at)).sum() / queries))
        densities.append(float(plan.density()[0]))
    return recalls, densities


def spread(values: list[float]) -> list[float]:
    """Median, least and largest."""
    return [round(v, 4) for v in (statistics.median(values), min(values), max(values))]


def show(row: dict[str, Any]) -> dict[str, Any]:
    print(json.dumps(row), flush=True)
    return row


def load(folder: str, tokens: int = 0) -> tuple[Any, Any]:
    """Model and tokenizer; positions beyond the model's own are extended by a larger rotary base."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    limit = model.config.max_position_embeddings
    if tokens > limit:
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        scale = tokens / limit
        width = model.config.head_dim
        # "NTK-aware" scaling of the base.
        model.config.rope_parameters["rope_theta"] *= scale ** (width / (width - 2))
        model.config.max_position_embeddings = tokens
        model.model.rotary_emb = LlamaRotaryEmbedding(model.config)
    return model, AutoTokenizer.from_pretrained(folder)
