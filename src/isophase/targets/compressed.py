"""A transformers model that answers from a compressed cache.

Legend: B prompts of one batch, T tokens, A answer tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedModel

from isophase.cache import Melted, Method, OpenCache, Record, compress, compressed, parse_method
from isophase.errors import IsophaseError
from isophase.models import cache_argument
from isophase.probes import Prompt
from isophase.targets.huggingface import load_part
from isophase.targets.modified import ModifiedTarget
from isophase.targets.strides import Grid

# Methods are compared on one model: its weights are loaded once. Weak: the last target takes them along.
_models: WeakValueDictionary[tuple[str, ...], PreTrainedModel] = WeakValueDictionary()
# And it reads a batch once for all methods that are asked it in turn: the ids that each model read last, and the cache.
_read: WeakKeyDictionary[PreTrainedModel, tuple[torch.Tensor, OpenCache]] = WeakKeyDictionary()


class CompressedTarget(ModifiedTarget):
    """Reads each prompt but for its last token, compresses, and answers from what was kept.

    The last token is read after compression: otherwise the first answer token would still come from the full
    attention of the prompt, and answers of one token would not touch the cache at all. Prompts are read whole, each
    by itself. Targets of one model that are asked
    the same prompts one after another share the reading, which full attention does whatever the method.

    A memory that melts is made while a prompt is read, in parts, without knowing the question: where a prompt tells its
    question apart, the question reads the text through the memory alone.

    Args:
        path: safetensors folder or hub id.
        cache: method, such as `chunkkv(budget=128)`.
        **kwargs: as for `HuggingFaceTarget`.

    Raises:
        IsophaseError: if the model, its tokenizer or the method cannot be used.
    """

    def __init__(self, path: str, *, cache: str, **kwargs: Any) -> None:
        super().__init__(path, call=cache, fact="cache", told=cache, **kwargs)
        vocabulary = len(load_part(AutoTokenizer, path, "tokenizer", **self._extra))
        self.method: Method = parse_method(cache, self.tokenizer.decode, vocabulary)
        if (stride := self.method.grid_tokens) is not None:
            self.added_grids = [Grid(stride_tokens=stride, kind="payload", setting="chunk_tokens of the cache")]

    @property
    def model(self) -> PreTrainedModel:
        """The model, shared by targets that differ in their method only."""
        if self._model is None:
            self._model = _models.get(self._key) or super().model
            _models[self._key] = self._model
        return self._model

    @property
    def reading(self) -> str:
        """Methods on one model share what it read."""
        return " ".join(map(str, self._key))

    @property
    def _key(self) -> tuple[str, ...]:
        return tuple(map(str, (self.path, self.gguf_file, self.device, self.dtype)))

    def _recording(self, ids_BT: torch.Tensor) -> OpenCache:
        """A cache that has recorded these prompts: the last one, if they are the same, else a new one.

        Raises:
            IsophaseError: if this model cannot be compressed by this method.
        """
        try:
            compress(self.model, self.method).close()  # complains before anything is read
        except ValueError as error:
            raise IsophaseError(f"{self.name}: {error}.") from error
        window = self.method.window_tokens
        if (last := _read.get(self.model)) is not None:
            last_BT, read = last
            if torch.equal(last_BT, ids_BT) and read.method.window_tokens >= window:
                return read
        _read.pop(self.model, None)  # before another is made: one batch is held, not two
        with compress(self.model, Record(window_tokens=max(window, Record.window_tokens))) as read:
            self._forward(ids_BT, 1, use_cache=True, **cache_argument(read))
        _read[self.model] = ids_BT, read
        return read

    def _logits(self, group: list[Prompt], answers: list[tuple[int, ...]], *, share: bool) -> torch.Tensor:
        """Logits that predict each answer token, [B, A, V]."""
        keep = len(answers[0])
        ids_BT = torch.from_numpy(
            np.stack([np.concatenate([p.ids, np.asarray(a[:-1])]) for p, a in zip(group, answers, strict=True)])
        ).long()
        rows = max(1, self.batch_tokens // ids_BT.shape[1])
        ask = self._ask_in_parts if self.method.melts else self._ask_recorded
        context = None if any(p.context_tokens is None for p in group) else group[0].context_tokens
        with torch.inference_mode():
            out = [ask(ids_BT[first : first + rows], keep, context) for first in range(0, len(ids_BT), rows)]
        return torch.cat(out)

    def _ask_recorded(self, ids_BT: torch.Tensor, keep: int, context: int | None) -> torch.Tensor:
        """Logits behind the last `keep` tokens, from what the method kept of those before."""
        with compressed(self.model, self._recording(ids_BT[:, :-keep]), self.method) as cache:
            found: torch.Tensor = self._forward(ids_BT[:, -keep:], keep, use_cache=True, **cache_argument(cache)).logits
        return found

    def _ask_in_parts(self, ids_BT: torch.Tensor, keep: int, context: int | None) -> torch.Tensor:
        """The same from a memory that was made as the text was read, and read by the question."""
        assert isinstance(self.method, Melted)
        try:
            memory = compress(self.model, self.method)
        except ValueError as error:
            raise IsophaseError(f"{self.name}: {error}.") from error
        ends = ids_BT.shape[1] - keep if context is None else min(context, ids_BT.shape[1] - keep)
        with memory as cache:
            for part in torch.split(ids_BT[:, :ends], self.method.part_tokens, dim=1):
                self._forward(part, 1, use_cache=True, **cache_argument(cache))
            found: torch.Tensor = self._forward(ids_BT[:, ends:], keep, use_cache=True, **cache_argument(cache)).logits
        return found
