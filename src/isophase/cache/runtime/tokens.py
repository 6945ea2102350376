"""What all layers of a cache share: which inputs are real tokens, their ids, and choices that layers reuse.

Legend: B rows, T tokens of this call, L logical length, K KV heads, N entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from isophase.cache.runtime.information import Surprise
from isophase.chunking import ChunkRule


@dataclass(eq=False)
class Tokens:
    """The stream of inputs that a cache has read.

    Attributes:
        rule: where chunks start, for methods whose chunks follow the ids; else None.
        rotate: moves keys to other positions, for methods that need it; else None.
        real_BL: which inputs are tokens and not padding; None where all are.
        ids_BL: ids of all inputs, int32; None without a rule.
        pending_BT: ids that the model has begun to read.
        reused: choices [B, K, N] of this call by number of the group of layers and first KV head.
        chunks_BL: chunk of each input, kept for the layers of one call.
        surprise: tells what tokens say, for memories that melt by it; else None.
        information_BL: what each input said, nats.
        decided_B: tokens of each row that have melted or were left alone for good.
    """

    rule: ChunkRule | None = None
    rotate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    real_BL: torch.Tensor | None = None
    ids_BL: torch.Tensor | None = None
    pending_BT: torch.Tensor | None = None
    reused: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    chunks_BL: torch.Tensor | None = None
    surprise: Surprise | None = None
    information_BL: torch.Tensor | None = None
    decided_B: torch.Tensor | None = None

    def reset(self) -> None:
        """Forget everything read."""
        self.real_BL = self.ids_BL = self.pending_BT = self.chunks_BL = None
        self.information_BL = self.decided_B = None
        if self.surprise is not None:
            self.surprise.reset()
        self.reused.clear()

    def select(self, choose: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a change of rows."""
        for name in ("real_BL", "ids_BL", "information_BL", "decided_B"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, choose(tensor))
        if self.surprise is not None:
            self.surprise.select(choose)

    def begin(self, rows: int, length: int) -> None:
        """The first layer has received `length` new inputs.

        Raises:
            ValueError: if ids are needed and the model was given embeddings, or another model read them.
        """
        self.reused.clear()
        self.chunks_BL = None
        if self.rule is None:
            return
        ids = self.pending_BT
        if ids is None or ids.shape != (rows, length):
            raise ValueError(
                "chunks by content need token ids, and the model was not given them through its input embedding; "
                "pass input_ids, not inputs_embeds, and keep the cache open while the model runs"
            )
        self.pending_BT = None
        new = ids.to(torch.int32)
        self.ids_BL = new if self.ids_BL is None else torch.cat([self.ids_BL, new], dim=1)

    def observe(self, mask: torch.Tensor | None, rows: int, logical: int) -> None:
        """Learn from a model's mask which inputs are padding.

        Args:
            mask: [B or 1, 1, T, L], bool (True: attended) or additive; None where nothing is masked but the future.
            rows: B.
            logical: L.
        """
        if mask is None:
            if self.real_BL is not None:
                new = self.real_BL.new_ones(rows, logical - self.real_BL.shape[1])
                self.real_BL = torch.cat([self.real_BL, new], dim=1)
            return
        # The last input of a call may attend to everything real before it, in every row, on whatever side the pads are.
        last = mask[:, 0, -1, :logical]
        real = last if last.dtype == torch.bool else last > torch.finfo(last.dtype).min / 2
        real = real.expand(rows, -1)
        self.real_BL = None if bool(real.all()) else real

    def hear(self, hidden_BTD: torch.Tensor) -> None:
        """Take down what the newest tokens said, from the states behind them."""
        if self.surprise is None:
            return
        assert self.ids_BL is not None
        new = hidden_BTD.shape[1]
        real = None if self.real_BL is None else self.real_BL[:, -new:]
        said = self.surprise.read(hidden_BTD, self.ids_BL[:, -new:], real)
        self.information_BL = said if self.information_BL is None else torch.cat([self.information_BL, said], dim=1)

    def index_BL(self, rows: int, logical: int, device: torch.device) -> torch.Tensor:
        """Which of its row's tokens each input is, from 0; pads count as the token before them."""
        if self.real_BL is None:
            return torch.arange(logical, device=device).expand(rows, logical)
        return (self.real_BL.long().cumsum(1) - 1).clamp(min=0)

    def chunk_BL(self, logical: int) -> torch.Tensor | None:
        """Number of the content-defined chunk of each input, from 0, long; None without a rule."""
        if self.rule is None:
            return None
        if self.chunks_BL is None:
            assert self.ids_BL is not None
            ids = self.ids_BL.long()
            assert ids.shape[1] == logical
            if self.real_BL is None:
                self.chunks_BL = _chunks(self.rule, ids)
            else:
                # Row by row: pads beside a token would take part in the neighbourhood that decides.
                self.chunks_BL = torch.zeros_like(ids)
                for row, real in enumerate(self.real_BL):
                    self.chunks_BL[row, real] = _chunks(self.rule, ids[row : row + 1, real])[0]
        return self.chunks_BL


def _chunks(rule: ChunkRule, ids_BT: torch.Tensor) -> torch.Tensor:
    flags, _ = rule.starts(ids_BT)
    starts = torch.zeros_like(flags)
    shift = rule.lookahead_tokens
    length = ids_BT.shape[1]
    # flags[t] speaks of token t - lookahead; the newest tokens are not decided yet and lie in the last chunk.
    if shift >= 0:
        starts[:, : max(0, length - shift)] = flags[:, shift:]
    else:
        starts[:, -shift:] = flags[:, : length + shift]
    starts[:, :1] = False
    return starts.long().cumsum(1)
