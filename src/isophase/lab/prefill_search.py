"""The offline search of `isophase.prefill` on a model folder and a text."""

from __future__ import annotations

import torch

from isophase.errors import IsophaseError
from isophase.prefill import PatternFile, search
from isophase.targets.huggingface import HuggingFaceTarget


def search_text(
    path: str, text: str, tokens: int, *, budget: float, seed: int, gguf_file: str | None = None
) -> PatternFile:
    """Search patterns for a model on the first tokens of a text.

    Args:
        path: safetensors folder or hub id.
        text: any text with at least `tokens` tokens.
        tokens: length to read.
        budget: keys that may be read, by those of dense attention, 0..1.
        seed: of the sampled queries.
        gguf_file: GGUF file inside the folder.

    Raises:
        IsophaseError: for a text that is too short or too long for the model, or what cannot be searched.
    """
    target = HuggingFaceTarget(path, gguf_file=gguf_file)
    limit = target.max_length_tokens
    if limit is not None and tokens > limit:
        raise IsophaseError(f"--tokens is {tokens}; the model reads {limit}.", f"Give {limit} or fewer.")
    ids = [*target.tokenizer.prefix_ids, *target.tokenizer.encode(text)][:tokens]
    if len(ids) < tokens:
        raise IsophaseError(
            f"the text has {len(ids)} tokens; --tokens asks for {tokens}.", "Give a longer text, or fewer tokens."
        )
    try:
        return search(target.model, torch.tensor([ids]), budget=budget, seed=seed, name=path)
    except ValueError as error:
        raise IsophaseError(f"hf:{path}: {error}.") from error
