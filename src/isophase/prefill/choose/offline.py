"""The offline search: for each layer and head the pattern and size that keep most attention, within a budget.

The model reads a text once, densely. Each head's sampled queries say what every candidate would keep and what the
executor would read for it; the budget then goes where it buys most attention.

Source: MInference 1.0, arXiv 2407.02490, section 3.2 and algorithm 1 (kernel-aware search). There every head gets the
same budget and the best pattern for it; here heads compete for one budget, and the cost is the number of keys that
the executor gathers, to which its time is proportional.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from itertools import pairwise
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from isophase.errors import IsophaseError
from isophase.prefill.attach import sparse_prefill
from isophase.prefill.choose.adapt import Choice
from isophase.prefill.patterns import AShape, BlockSparse, Dense, Pattern, VerticalSlash
from isophase.prefill.patterns.file import HeadPattern, PatternFile
from isophase.prefill.patterns.spec import write_pattern
from isophase.prefill.sample import HeadSample, Sampling

CANDIDATES: tuple[Pattern, ...] = (
    *(AShape(first_tokens=128, local_tokens=local) for local in (256, 1024, 2048, 4096)),
    *(
        VerticalSlash(columns=columns, slash_tokens=slash)
        for columns in (32, 128, 256, 512, 1024, 2048)
        for slash in (128, 256, 512, 1024, 2048, 4096)
    ),
    *(BlockSparse(windows=windows) for windows in (8, 16, 32, 64, 128)),
)


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What one candidate would do for one head.

    Attributes:
        pattern: the candidate.
        recall: share of attention that it keeps, 0..1.
        cost: keys read by keys that dense attention reads, 0..1.
    """

    pattern: Pattern
    recall: float
    cost: float


@dataclass(kw_only=True)
class Survey:
    """A policy that reads everything, and notes what candidates would have kept.

    Attributes:
        candidates: to try.
        offers: by layer and head, in the order of the candidates, dense attention last.
    """

    candidates: tuple[Pattern, ...] = CANDIDATES
    offers: dict[tuple[int, int], list[Offer]] = field(default_factory=dict)

    def is_dense(self, layer: int, head: int) -> bool:
        """As `Policy.is_dense`: all are looked at."""
        return False

    def choose(self, layer: int, head: int, sample: HeadSample) -> Choice:
        """As `Policy.choose`: dense."""
        geometry = sample.geometry
        own = geometry.query_tokens / 2
        dense = float(geometry.starts_Q.double().mean())
        offers = []
        for pattern in self.candidates:
            assert not isinstance(pattern, Dense), "dense attention is always offered"
            reads = pattern.choose(sample)
            cost = min(1.0, (reads.keys_per_query() + own) / (dense + own))
            kept = float(sample.kept(reads.at(sample.block_V), len(reads.columns)).mean())
            offers.append(Offer(pattern=pattern, recall=kept, cost=cost))
        offers.append(Offer(pattern=Dense(), recall=1.0, cost=1.0))
        self.offers[layer, head] = offers
        return Choice(pattern=Dense(), reads=None, recall=1.0, keys_per_query=dense)


def search(
    model: PreTrainedModel,
    ids_1T: torch.Tensor,
    *,
    budget: float = 0.25,
    seed: int = 0,
    name: str = "",
    candidates: tuple[Pattern, ...] = CANDIDATES,
) -> PatternFile:
    """Search patterns for a model on a text.

    Args:
        model: as for `sparse_prefill`.
        ids_1T: token ids of any text, [1, T]; as long as the prompts that the patterns are for.
        budget: keys that may be read, by those of dense attention, mean over all heads, above 0 and at most 1.
        seed: of the sampled queries. The same text and seed give the same patterns.
        name: of the model, for the file.
        candidates: patterns to try; dense attention is always one.

    Returns:
        The patterns. Save them with `save`.

    Raises:
        ValueError: for a budget out of range or below the smallest candidates, or a text that is too short.
    """
    if not 0 < budget <= 1:
        raise ValueError(f"budget is {budget}; give a share of dense attention, such as 0.25")
    if ids_1T.dim() != 2 or ids_1T.shape[0] != 1 or ids_1T.shape[1] < 512:
        raise ValueError(f"ids are {tuple(ids_1T.shape)}; give one row of 512 tokens or more")
    survey = Survey(candidates=candidates)
    with torch.inference_mode(), sparse_prefill(
        model, survey, threshold_tokens=1, sampling=Sampling(seed=seed, spread=64, verify=128)
    ) as run:  # fmt: skip
        model(ids_1T.to(model.device), logits_to_keep=1, use_cache=False)
    if not survey.offers:
        reasons = ", ".join(sorted({call.why for call in run.calls}))
        raise ValueError(f"no layer was read along a plan ({reasons or 'no attention was called'})")
    # Heads are looked at side by side: in the order of their names sums do not depend on which was first.
    chosen = spend(dict(sorted(survey.offers.items())), budget)
    config = model.config.get_text_config(decoder=True)
    layers = []
    for layer in range(config.num_hidden_layers):
        # Layers with a sliding window are read exactly; what is written here is not asked for.
        rows = [chosen.get((layer, h), _EXACT) for h in range(config.num_attention_heads)]
        layers.append(tuple(
            HeadPattern(pattern=write_pattern(o.pattern), recall=round(o.recall, 4), density=round(o.cost, 4))
            for o in rows
        ))  # fmt: skip
    digest = sha256(ids_1T.cpu().numpy().tobytes()).hexdigest()[:12]
    return PatternFile(
        model=name or type(model).__name__, text=digest, tokens=ids_1T.shape[1], seed=seed, budget=budget,
        layers=tuple(layers),
    )  # fmt: skip


_EXACT = Offer(pattern=Dense(), recall=1.0, cost=1.0)


def spend(offers: dict[tuple[int, int], list[Offer]], budget: float) -> dict[tuple[int, int], Offer]:
    """One offer for each head: as much recall as possible for a mean cost of at most `budget`.

    On the upper hull of each head's offers, recall per cost falls from step to step; the best steps of all heads are
    bought until the budget is spent. That is the best choice for every cost at which it stops exactly.

    Raises:
        ValueError: if even the cheapest offers cost more.
    """
    hulls = {head: _hull(some) for head, some in offers.items()}
    at = dict.fromkeys(hulls, 0)
    left = budget * len(hulls) - sum(hull[0].cost for hull in hulls.values())
    if left < 0:
        least = sum(hull[0].cost for hull in hulls.values()) / len(hulls)
        raise ValueError(f"budget {budget} is less than the smallest patterns cost; give {least:.2f} or more")
    steps = sorted(
        (-(b.recall - a.recall) / (b.cost - a.cost), head, n)
        for head, hull in hulls.items()
        for n, (a, b) in enumerate(pairwise(hull))
    )
    for _, head, n in steps:
        extra = hulls[head][n + 1].cost - hulls[head][n].cost
        if at[head] == n and extra <= left:
            at[head], left = n + 1, left - extra
    return {head: hull[at[head]] for head, hull in hulls.items()}


def _hull(offers: list[Offer]) -> list[Offer]:
    """Offers on the upper hull of recall over cost, from the cheapest on."""
    hull: list[Offer] = []
    for offer in sorted(offers, key=lambda o: (o.cost, -o.recall)):
        if hull and offer.recall <= hull[-1].recall:
            continue
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (b.recall - a.recall) * (offer.cost - a.cost) > (offer.recall - a.recall) * (b.cost - a.cost):
                break
            hull.pop()
        hull.append(offer)
    return hull


class ReadingModel(Protocol):
    """A model with its tokenizer, such as `isophase.targets.huggingface.HuggingFaceTarget`."""

    @property
    def model(self) -> PreTrainedModel:
        """The model; loaded when it is first asked for."""

    @property
    def tokenizer(self) -> Any:
        """With `prefix_ids` and `encode`."""

    @property
    def max_length_tokens(self) -> int | None:
        """Longest text that it reads."""

    @property
    def name(self) -> str:
        """In messages."""


def search_text(
    reader: ReadingModel, text: str, tokens: int, *, budget: float, seed: int, name: str = ""
) -> PatternFile:
    """Search patterns for a model on the first tokens of a text.

    Args:
        reader: the model.
        text: any text with at least `tokens` tokens.
        tokens: length to read.
        budget: keys that may be read, by those of dense attention, 0..1.
        seed: of the sampled queries.
        name: of the model in the file.

    Raises:
        IsophaseError: for a text that is too short or too long for the model, or what cannot be searched.
    """
    limit = reader.max_length_tokens
    if limit is not None and tokens > limit:
        raise IsophaseError(f"--tokens is {tokens}; the model reads {limit}.", f"Give {limit} or fewer.")
    ids = [*reader.tokenizer.prefix_ids, *reader.tokenizer.encode(text)][:tokens]
    if len(ids) < tokens:
        raise IsophaseError(
            f"the text has {len(ids)} tokens; --tokens asks for {tokens}.", "Give a longer text, or fewer tokens."
        )
    try:
        return search(reader.model, torch.tensor([ids]), budget=budget, seed=seed, name=name)
    except ValueError as error:
        raise IsophaseError(f"{reader.name}: {error}.") from error
