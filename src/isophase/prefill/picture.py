"""Pictures of patterns: one line per layer, one cell per head; colour is the pattern, fill the density.

Drawn from a file of patterns or from a run. Below each cell's fill stands the recall where it is short of the rest.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from pydantic import ValidationError

from isophase.errors import IsophaseError
from isophase.prefill.patterns.file import PatternFile
from isophase.prefill.run import PrefillRun

_CELL_W, _CELL_H, _GAP, _LEFT, _TOP = 64, 18, 3, 64, 46
COLOURS = {
    "a_shape": "#e09f3e", "vertical_slash": "#1b4965", "block_sparse": "#9e2a2b", "dense": "#888888",
    "window": "#5fa8d3",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HeadFacts:
    """What is known of one head.

    Attributes:
        layer: of the model.
        head: query head.
        pattern: as text; of a run, the one that it read most often by kind.
        density: mean, 0..1.
        recall: mean, 0..1; None where it was not measured.
    """

    layer: int
    head: int
    pattern: str
    density: float
    recall: float | None

    @property
    def kind(self) -> str:
        """Name of the pattern."""
        return self.pattern.partition("(")[0]


def read_result(path: Path) -> PatternFile | PrefillRun:
    """Read a file of patterns or a run.

    Raises:
        IsophaseError: if it is missing or neither.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise IsophaseError(
            f"cannot read {str(path)!r} ({type(error).__name__}).", "Give a file of patterns or of a run."
        ) from error
    for kind in (PatternFile, PrefillRun):
        try:
            return kind.model_validate_json(text)
        except ValidationError:
            continue
    raise IsophaseError(
        f"{str(path)!r} is neither patterns nor a run.",
        "Give what isophase prefill search wrote, or what PrefillRun.save did.",
    )


def head_facts(result: PatternFile | PrefillRun) -> list[HeadFacts]:
    """Facts of every head, by layer and head; over all calls of a run."""
    if isinstance(result, PatternFile):
        return [
            HeadFacts(layer=layer, head=head, pattern=h.pattern, density=h.density, recall=h.recall)
            for layer, heads in enumerate(result.layers)
            for head, h in enumerate(heads)
        ]
    by_head: dict[tuple[int, int], list[tuple[str, float, float | None]]] = {}
    for call in result.calls:
        for head, h in enumerate(call.heads):
            by_head.setdefault((call.layer, head), []).append((h.pattern, h.density, h.recall))
    facts = []
    for (layer, head), seen in sorted(by_head.items()):
        kinds = Counter(pattern.partition("(")[0] for pattern, _, _ in seen)
        kind = kinds.most_common(1)[0][0]
        recalls = [recall for _, _, recall in seen if recall is not None]
        facts.append(
            HeadFacts(
                layer=layer, head=head, pattern=next(p for p, _, _ in reversed(seen) if p.partition("(")[0] == kind),
                density=sum(d for _, d, _ in seen) / len(seen), recall=sum(recalls) / len(recalls) if recalls else None,
            )
        )  # fmt: skip
    return facts


def draw_densities(result: PatternFile | PrefillRun, *, title: str = "") -> str:
    """Draw patterns, densities and recall of every head.

    Args:
        result: patterns or a run.
        title: line above the picture.

    Returns:
        An SVG of its own.

    Raises:
        ValueError: for a run that read nothing sparsely.
    """
    facts = head_facts(result)
    if not facts:
        raise ValueError("nothing was read along a plan, so there is nothing to draw")
    layers = sorted({f.layer for f in facts})
    row_of = {layer: n for n, layer in enumerate(layers)}
    width = _LEFT + (max(f.head for f in facts) + 1) * (_CELL_W + _GAP) + 8
    height = _TOP + len(layers) * (_CELL_H + _GAP) + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="16" font-size="12">{escape(title or "Sparse prefill")}</text>',
    ]
    x = 8.0
    for kind in sorted({f.kind for f in facts}):
        parts.append(f'<rect x="{x:.0f}" y="24" width="10" height="10" fill="{COLOURS.get(kind, "#000000")}"/>')
        parts.append(f'<text x="{x + 14:.0f}" y="33" font-size="10">{escape(kind)}</text>')
        x += 24 + 6.2 * len(kind)
    for layer in layers:
        y = _TOP + row_of[layer] * (_CELL_H + _GAP)
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 13}" text-anchor="end" font-size="9">layer {layer}</text>')
    for f in facts:
        left, y = _LEFT + f.head * (_CELL_W + _GAP), _TOP + row_of[f.layer] * (_CELL_H + _GAP)
        colour = COLOURS.get(f.kind, "#000000")
        recall = "" if f.recall is None else f"{f.recall:.2f}"
        parts.append(
            f"<g><title>{escape(f'layer {f.layer}, head {f.head}: {f.pattern}, density {f.density:.3f}')}"
            f"{', recall ' + recall if recall else ''}</title>"
            f'<rect x="{left}" y="{y}" width="{_CELL_W}" height="{_CELL_H}" fill="{colour}" fill-opacity="0.12"/>'
            f'<rect x="{left}" y="{y}" width="{_CELL_W * min(1.0, f.density):.1f}" height="{_CELL_H}" fill="{colour}"'
            f' fill-opacity="0.75"/>'
            f'<text x="{left + _CELL_W - 4}" y="{y + 13}" text-anchor="end" font-size="9">{recall}</text></g>'
        )
    parts.append(
        f'<text x="{_LEFT}" y="{height - 8}" font-size="9">filled: share of keys read; number: share of attention '
        "kept</text></svg>\n"
    )
    return "".join(parts)


def summary(result: PatternFile | PrefillRun) -> list[str]:
    """Totals in a few lines."""
    if isinstance(result, PatternFile):
        return [
            f"{result.model}: recall {result.recall():.3f} of attention with {result.density():.3f} of the keys, on "
            f"{result.tokens} tokens; budget {result.budget}, seed {result.seed}"
        ]
    reasons = Counter(call.why for call in result.calls)
    lines = [
        f"recall {result.recall():.3f} of attention, worst head {result.worst_recall():.3f}, with "
        f"{result.density():.3f} of the keys; {result.patterns}, sparse from {result.threshold_tokens} tokens",
        "calls: " + ", ".join(f"{count} {why}" for why, count in reasons.most_common()),
    ]
    if seconds := result.seconds():
        lines.append("seconds: " + ", ".join(f"{part} {value:.3f}" for part, value in seconds.items()))
    return lines
