"""ChunkKV over chunks that follow the content, so that no token has a phase.

Legend: B rows, K KV heads, E entries, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from isophase.cache.methods.base import Method
from isophase.cache.methods.chunkkv import Average, chunk_scores, votes_by_kv_head
from isophase.cache.methods.scene import Scene
from isophase.chunking import ChunkRule, LocalMaximum, RuleState, Threshold, TokenHash, TokenRanks

_LINE_END, _SENTENCE_END, _PAUSE = 3, 2, 1


@dataclass(frozen=True, kw_only=True)
class After:
    """Starts a chunk one token after the starts of another rule: a delimiter then ends its chunk.

    Attributes:
        rule: whose starts are moved; its look-ahead must be at least 0.
    """

    rule: ChunkRule

    @property
    def lookahead_tokens(self) -> int:
        """One token less than the rule's."""
        return self.rule.lookahead_tokens - 1

    @property
    def max_tokens(self) -> int:
        """One token more: the first chunk of a stream is longer by one."""
        return self.rule.max_tokens + 1

    def starts(
        self, ids_BT: torch.Tensor, hidden_BTD: torch.Tensor | None = None, state: RuleState | None = None
    ) -> tuple[torch.Tensor, RuleState]:
        """As `ChunkRule.starts`: the same answers, which now mean one token later."""
        return self.rule.starts(ids_BT, hidden_BTD, state)


def delimiter_rule(
    decode: Callable[[list[int]], str], vocabulary: int, *, radius_tokens: int = 4, max_tokens: int = 48
) -> ChunkRule:
    """Chunks that end after line ends, sentences or pauses, whichever is strongest within the radius.

    Args:
        decode: text of token ids.
        vocabulary: number of token ids.
        radius_tokens: chunks are longer than this.
        max_tokens: longest chunk where no delimiter comes.

    Returns:
        The rule; exact under any shift of the text, where a delimiter comes within `max_tokens`.
    """
    ranks = [_rank(decode([token])) for token in range(vocabulary)]
    score = TokenRanks(ranks=tuple(ranks), break_ties=False)
    return After(rule=LocalMaximum(score=score, radius_tokens=radius_tokens, max_tokens=max_tokens))


def _rank(text: str) -> int:
    if "\n" in text:
        return _LINE_END
    body = text.rstrip().rstrip("\"'”’)]")
    if body.endswith((".", "!", "?", "。", "！", "？")):
        return _SENTENCE_END
    return _PAUSE if body.endswith((",", ";", ":", "，", "；", "：", "、")) else 0


def word_rule(decode: Callable[[list[int]], str], vocabulary: int, *, max_tokens: int = 16) -> ChunkRule:
    """Chunks that are words, with the space before them; punctuation stands for itself.

    Args:
        decode: text of token ids.
        vocabulary: number of token ids.
        max_tokens: longest chunk.
    """
    # Two tokens, because decoders drop the space at the start of a text.
    stem = decode([0])
    texts = (decode([0, token])[len(stem) :] for token in range(vocabulary))
    ranks = tuple(int(not text[:1].isalnum()) for text in texts)
    return Threshold(score=TokenRanks(ranks=ranks, break_ties=False), threshold=0, max_tokens=max_tokens)


def hash_rule(*, radius_tokens: int = 4, max_tokens: int = 24) -> ChunkRule:
    """Chunks that start at tokens with the largest hash within the radius: exact, and blind to meaning."""
    return LocalMaximum(score=TokenHash(), radius_tokens=radius_tokens, max_tokens=max_tokens)


@dataclass(frozen=True, kw_only=True)
class DynamicChunkKV(Method):
    """Keeps the content-defined chunks that the newest queries attend to.

    Chunks are kept whole, best first; the last one that the budget reaches keeps its first tokens.

    Attributes:
        rule: where chunks start, from token ids alone; default the local maximum of a hash with radius 4.
        average: what a chunk's summed votes are divided by: nothing (`sum`), the root of its length (`root`),
            its length (`mean`). Long chunks would win by length under `sum`, one-word ones under `mean`.
        share_heads: as in `ChunkKV`.

    Raises:
        ValueError: for a rule that reads hidden states, which a cache does not see.

    Source: scores as in ChunkKV (arXiv 2502.00299); chunks by content are ours.
    """

    rule: ChunkRule = field(default_factory=hash_rule)
    average: Average = "root"
    share_heads: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.average not in ("sum", "root", "mean"):
            raise ValueError(f"average {self.average!r} must be sum, root or mean")
        score = getattr(self.rule, "score", None)
        if getattr(score, "needs_hidden", False):
            raise ValueError(
                f"{type(score).__name__} reads hidden states, which a cache does not see; use TokenHash or TokenRanks"
            )

    @property
    def chunk_rule(self) -> ChunkRule | None:
        """The rule."""
        return self.rule

    def score(self, scene: Scene) -> torch.Tensor:
        """Votes of each entry's chunk, divided as `average` says."""
        votes_BKE = votes_by_kv_head(scene, self.share_heads)
        return chunk_scores(votes_BKE, scene.chunk_BKE(), ~scene.protected_BKE, self.average)
