"""Melted chunks against the definition: keys before rotary, averaged, turned to the middle of their tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from isophase.cache import MergedChunks, compress
from isophase.models.compat import cache_argument

CHUNK = 5


def turn(key: torch.Tensor, position: int, theta: float, part: int) -> torch.Tensor:
    """Rotary embedding of one vector: pairs `(x[i], x[i + R/2])` turn by `position * theta^(-2i/R)`."""
    out, half = key.clone(), part // 2
    for i in range(half):
        angle = torch.tensor(position * theta ** (-2 * i / part), dtype=torch.float64)
        a, b = key[i], key[i + half]
        out[i] = a * torch.cos(angle) - b * torch.sin(angle)
        out[i + half] = b * torch.cos(angle) + a * torch.sin(angle)
    return out


def theta_of(model: Any) -> float:
    parameters = getattr(model.config, "rope_parameters", None) or {}
    return float(parameters.get("rope_theta", 10_000.0))


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi", "gpt_neox"])
def test_a_melted_key_is_the_mean_before_rotary(family, make_model, random_ids) -> None:
    model, ids = make_model(family), random_ids(80)
    cache, plain = (
        compress(model, MergedChunks(budget=26, window_tokens=6, chunk_tokens=CHUNK, weights="mean")),
        DynamicCache(config=model.config),
    )
    with torch.no_grad():
        model(ids, **cache_argument(cache))
        model(ids, **cache_argument(plain))
    kept = cache.what_was_kept()[0]
    rotated = plain.layers[0].keys.double()
    width = rotated.shape[-1]
    part = int(width * {"phi": 0.5, "gpt_neox": 0.25}.get(family, 1.0))
    theta, seen = theta_of(model), 0
    assert kept.counts_BKE is not None
    for head in range(rotated.shape[1]):
        for entry, (place, count) in enumerate(
            zip(kept.positions_BKE[0, head].tolist(), kept.counts_BKE[0, head].tolist(), strict=True)
        ):
            last = (place // CHUNK + 1) * CHUNK
            members = [place] if count == 1 else list(range(last - int(count), last))
            if last > 74 and count > 1:
                continue  # the chunk that the window cuts
            # Undo each key's rotation, average, turn to the middle: from the definition, not by differences.
            before = [turn(rotated[0, head, p], -p, theta, part) for p in members]
            want = turn(torch.stack(before).mean(0), place, theta, part)
            torch.testing.assert_close(cache.layers[0].keys[0, head, entry].double(), want, atol=3e-5, rtol=1e-3)
            value = plain.layers[0].values[0, head, members].mean(0)
            torch.testing.assert_close(cache.layers[0].values[0, head, entry], value, atol=1e-5, rtol=1e-4)
            seen += count > 1
    assert seen > 2


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_an_entry_counts_as_often_as_it_has_tokens(attention, make_model, random_ids) -> None:
    model = make_model("llama", attention=attention)
    cache = compress(model, MergedChunks(budget=26, window_tokens=6, chunk_tokens=CHUNK))
    with torch.no_grad():
        model(random_ids(80), **cache_argument(cache))
    layer = cache.layers[0]
    layer.cumulative_length += 1  # as while the next token is read
    layer.keys = torch.cat([layer.keys, layer.keys[:, :, -1:]], dim=2)
    mask = layer.mask(torch.zeros(1, 4, 1, 8), None, attention)
    counts = torch.nn.functional.pad(layer.counts_BKP, (0, 1), value=1.0)
    torch.testing.assert_close(mask[0, :, 0].exp(), counts[0].repeat_interleave(2, dim=0))


def test_melting_goes_on_over_parts(make_model, random_ids) -> None:
    """Entries melted before are melted again with their counts: no token is counted twice."""
    model, ids = make_model("llama"), random_ids(150)
    cache = compress(model, MergedChunks(budget=26, window_tokens=6, chunk_tokens=CHUNK, merged_share=0.8))
    with torch.no_grad():
        for first in range(0, 150, 50):
            model(ids[:, first : first + 50], **cache_argument(cache))
    kept = cache.what_was_kept()[1]
    assert kept.counts_BKE is not None
    assert kept.positions_BKE.shape == (1, 2, 26)
    assert (kept.counts_BKE.sum(-1) <= 150).all()
    assert (kept.counts_BKE <= CHUNK).all()
