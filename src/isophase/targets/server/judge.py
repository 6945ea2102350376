"""From a server's reply to an answer."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

from isophase.probes import Prompt, Tokenizer, piece_ids
from isophase.targets.base import Answer
from isophase.targets.server.protocols import Reply


def failed(reason: str) -> Answer:
    """No answer, and why."""
    return Answer(status="error", correct=False, log_probability=math.nan, detail=reason)


def misread(sent: Sequence[int], reply: Reply) -> str:
    """How the tokens that the server read differ from those sent; empty where they do not, or it does not say."""
    if reply.echoed_ids is not None and reply.echoed_ids != tuple(sent):
        where = next(
            (n for n, (a, b) in enumerate(zip(sent, reply.echoed_ids, strict=False)) if a != b),
            min(len(sent), len(reply.echoed_ids)),
        )
        return f"the server read other tokens than were sent, from token {where} on"
    if reply.prompt_tokens is not None and reply.prompt_tokens != len(sent):
        return f"the server read {reply.prompt_tokens} tokens, {len(sent)} were sent"
    return ""


def judge_ids(prompt: Prompt, reply: Reply, tokenizer: Tokenizer) -> Answer:
    """Hold generated tokens against the prompt's answer; log-probability left unknown.

    Args:
        prompt: with `answer_ids` of length A.
        reply: to a request for A greedy tokens.
        tokenizer: reads the text of servers that send no ids.
    """
    expected = prompt.answer_ids
    if reply.output_ids is None:
        output = tuple(piece_ids(tokenizer, reply.text))[: len(expected)]
        if reply.text and reply.text.strip() == tokenizer.decode(expected).strip():
            output = expected  # the same text, cut into tokens otherwise
    else:
        output = reply.output_ids[: len(expected)]
    correct = output == expected
    unfinished = len(output) < len(expected) and output == expected[: len(output)]
    if unfinished and reply.cut_off:
        return Answer(
            status="truncated",
            correct=False,
            log_probability=math.nan,
            output_ids=output,
            detail=f"cut off after {len(output)} of {len(expected)} tokens",
        )
    well_formed = correct or not prompt.valid_first_ids or (bool(output) and output[0] in prompt.valid_first_ids)
    return Answer(
        status="ok" if well_formed else "wrong_format", correct=correct, log_probability=math.nan, output_ids=output
    )


def judge_text(prompt: Prompt, reply: Reply, tokenizer: Tokenizer) -> Answer:
    """Find the first well-formed answer in a sentence of a chat model.

    Args:
        prompt: whose answers, by their first tokens, are words.
        reply: with text.
        tokenizer: of the prompt.
    """
    right = tokenizer.decode(prompt.answer_ids).strip()
    words = {tokenizer.decode([first]).strip() for first in prompt.valid_first_ids} | {right}
    pattern = "|".join(re.escape(word) for word in sorted(words, key=lambda w: (-len(w), w)) if word)
    found = re.search(rf"(?<!\w)(?:{pattern})(?!\w)", reply.text)
    output = tuple(piece_ids(tokenizer, reply.text.strip())[:64])
    if found is None:
        cut_off = Answer(
            status="truncated",
            correct=False,
            log_probability=math.nan,
            output_ids=output,
            detail="cut off before an answer",
        )
        return cut_off if reply.cut_off else replace(cut_off, status="wrong_format", detail="")
    # Values of several words: the first one decides where to look, all of them whether it is right.
    correct = reply.text[found.start() :].startswith(right)
    return Answer(status="ok", correct=correct, log_probability=math.nan, output_ids=output)


def known_log_probability(ids: Sequence[int], output: Sequence[int], reply: Reply, tokenizer: Tokenizer) -> float:
    """Log-probability of `ids` from the alternatives to what was generated; nan where they do not hold it.

    Alternatives at place n follow the n tokens generated so far, so they speak of `ids` only up to and
    including the first place where the two differ.
    """
    total = 0.0
    for place, token in enumerate(ids):
        if tuple(output[:place]) != tuple(ids[:place]) or place >= len(reply.alternatives):
            return math.nan
        alternatives = reply.alternatives[place]
        value = alternatives.get(token)
        if value is None and reply.output_ids is None:
            text = tokenizer.decode([token])
            value = alternatives.get(text, alternatives.get(" " + text))
        if value is None:
            return math.nan
        total += value
    return total
