"""A picture of what a cache keeps: one line per layer and KV head, one column per stretch of the input."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

import torch

from isophase.cache.runtime.whole import Kept

_ROW_PX, _GAP_PX, _LEFT_PX, _TOP_PX, _WIDTH_PX = 5, 3, 64, 28, 960


def draw_kept(kept: Sequence[Kept], length_tokens: int, *, row: int = 0, title: str = "") -> str:
    """Draw what each layer and KV head of one row keeps.

    Args:
        kept: what `CompressedCache.what_was_kept` returned.
        length_tokens: logical length of the input, padding included.
        row: row of the batch.
        title: line above the picture.

    Returns:
        An SVG of its own. The darker a column, the larger the share of its tokens that is kept.

    Raises:
        ValueError: if nothing was read, or the row is not there.
    """
    if not kept or length_tokens < 1:
        raise ValueError("the cache has read nothing; draw it after a forward pass")
    rows = kept[0].positions_BKE.shape[0]
    if not 0 <= row < rows:
        raise ValueError(f"row {row} is not one of 0..{rows - 1}")
    columns = min(length_tokens, 480)
    edges = torch.arange(columns + 1) * length_tokens // columns
    width = (_WIDTH_PX - _LEFT_PX) / columns
    parts, y = [], float(_TOP_PX)
    for layer in kept:
        parts.append(
            f'<text x="{_LEFT_PX - 8}" y="{y + _ROW_PX + 2:.0f}" text-anchor="end" font-size="9">'
            f"layer {layer.layer}</text>"
        )
        for places_E in layer.positions_BKE[row].cpu():
            column = torch.bucketize(places_E[places_E >= 0], edges[1:], right=True).clamp(max=columns - 1)
            share = torch.bincount(column, minlength=columns) / edges.diff().clamp(min=1)
            parts += [
                f'<rect x="{_LEFT_PX + n * width:.1f}" y="{y:.0f}" width="{width + 0.1:.1f}" height="{_ROW_PX}" '
                f'fill-opacity="{min(1.0, value):.2f}"/>'
                for n, value in enumerate(share.tolist())
                if value > 0
            ]
            y += _ROW_PX
        y += _GAP_PX
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH_PX} {y + 20:.0f}" '
        f'font-family="sans-serif" fill="#1b4965"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="{_LEFT_PX}" y="16" font-size="12">{escape(title or "Tokens kept")}</text>'
    )
    foot = (
        f'<text x="{_LEFT_PX}" y="{y + 12:.0f}" font-size="9">token 0</text>'
        f'<text x="{_WIDTH_PX}" y="{y + 12:.0f}" font-size="9" text-anchor="end">{length_tokens - 1}</text></svg>\n'
    )
    return head + "".join(parts) + foot
