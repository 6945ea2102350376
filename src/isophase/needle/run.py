"""Ask: every prompt is read once, then compressed and answered by every method.

Legend: T tokens, A answer tokens, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from isophase import __version__
from isophase.cache import Method, Record, compress, compressed, parse_method
from isophase.errors import IsophaseError
from isophase.models import cache_argument
from isophase.needle.prompts import NEEDLE, QUESTION, NeedlePrompt, NeedleTask
from isophase.needle.settings import NeedleSettings
from isophase.needle.store import NeedleAnswer, NeedleFolder
from isophase.targets import HuggingFaceTarget


def settings_for(
    target: HuggingFaceTarget,
    caches: tuple[str, ...],
    lengths: tuple[int, ...],
    depths: int,
    phases: int,
    seed: int,
    haystack_digest: str,
) -> NeedleSettings:
    """Settings of a run on a model.

    Raises:
        IsophaseError: for a length beyond what the model reads, or a method named twice.
    """
    limit = target.max_length_tokens
    if limit is not None and max(lengths) > limit:
        raise IsophaseError(
            f"a prompt of {max(lengths)} tokens is longer than the {limit} that {target.name} reads.",
            "Give shorter --lengths.",
        )
    if len(set(caches)) < len(caches):
        raise IsophaseError("the same cache method is named twice.", "Name each once.")
    return NeedleSettings(
        target=target.name,
        fingerprint=target.fingerprint(),
        caches=caches,
        lengths=lengths,
        depths=depths,
        phases=phases,
        seed=seed,
        haystack=haystack_digest,
        wording=NEEDLE + QUESTION,
        gguf_file=target.gguf_file,
        isophase=__version__,
    )


def run_needle(
    target: HuggingFaceTarget,
    settings: NeedleSettings,
    haystack: str,
    folder: Path,
    say: Callable[[int, int, float], None] | None = None,
) -> dict[int, NeedleAnswer]:
    """Ask every prompt that the folder has no answer to.

    Args:
        target: the model.
        settings: of the run.
        haystack: text around the needle.
        folder: run folder; created, or resumed.
        say: called after each prompt with prompts done, prompts in all and seconds per prompt.

    Returns:
        All answers by row.

    Raises:
        IsophaseError: for methods or a model that cannot be compressed, or a folder that cannot be used.
    """
    task = NeedleTask(settings, target.tokenizer, haystack)
    vocabulary = int(target.config.get_text_config().vocab_size)
    methods = [parse_method(spec, target.tokenizer.decode, vocabulary) for spec in settings.caches]
    record = Record(window_tokens=max(method.window_tokens for method in methods))
    for spec, method in zip(settings.caches, methods, strict=True):
        try:
            compress(target.model, method).close()
        except ValueError as error:
            raise IsophaseError(f"{settings.target} with {spec}: {error}.") from error
    with NeedleFolder(folder, settings) as run:
        missing = [row for row in range(settings.prompts) if row not in run.answers]
        began = time.monotonic()
        for done, row in enumerate(missing, start=1):
            run.append(ask(target, methods, record, task.prompt(row), row))
            if say is not None:
                elapsed = time.monotonic() - began
                say(settings.prompts - len(missing) + done, settings.prompts, elapsed / done)
        return dict(run.answers)


def ask(
    target: HuggingFaceTarget, methods: list[Method], record: Record, prompt: NeedlePrompt, row: int
) -> NeedleAnswer:
    """Read a prompt but for its last token, compress it by each method, and answer from what each kept."""
    ids = torch.from_numpy(prompt.ids).long()[None].to(target.device)
    answer = torch.tensor([prompt.answer_ids], device=target.device)
    last = torch.cat([ids[:, -1:], answer[:, :-1]], dim=1)
    correct, log_p, entries, stored = [], [], [], []
    with torch.inference_mode(), compress(target.model, record) as read:
        target.model(ids[:, :-1], logits_to_keep=1, use_cache=True, **cache_argument(read))
        for method in methods:
            with compressed(target.model, read, method) as cache:
                entries.append(int((cache.what_was_kept()[0].positions_BKE[0] >= 0).sum(-1).max()))
                stored.append(cache.stored_bytes())
                logits_AV = target.model(last, use_cache=True, **cache_argument(cache)).logits[0].float()
            correct.append(bool((logits_AV.argmax(-1) == answer[0]).all()))
            chosen = torch.log_softmax(logits_AV, -1).gather(1, answer[0][:, None])
            log_p.append(round(float(chosen.double().sum()), 6))
    return NeedleAnswer(
        row=row,
        position_tokens=prompt.position_tokens,
        correct=tuple(correct),
        log_probability=tuple(log_p),
        entries=tuple(entries),
        stored_bytes=tuple(stored),
    )
