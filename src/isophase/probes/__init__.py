"""Prompts in which only the phase of the queried fact moves."""

from __future__ import annotations

from typing import get_args

from isophase.probes.completion import SHORTEST_TOKENS, CompletionProbe
from isophase.probes.lexicon import FILLER, KEYS, PROSE, VALUES
from isophase.probes.own import OwnPrompt, read_prompt
from isophase.probes.pairs import ASK_ID, END_ID, FILLER_IDS, KEY_IDS, PAD_ID, VALUE_IDS, WORDS, WORDS_PER_CLASS
from isophase.probes.prompt import Probe, Prompt, Tokenizer
from isophase.probes.records import RecordsProbe
from isophase.probes.settings import ProbeName, ProbeSettings
from isophase.probes.styles import STYLES, RecordStyle, pick_style
from isophase.probes.vocabulary import Ids, has_closed_vocabulary, piece_ids, prose_ids, single_token_words

PROBE_NAMES: tuple[str, ...] = get_args(ProbeName)

__all__ = [
    "ASK_ID",
    "END_ID",
    "FILLER",
    "FILLER_IDS",
    "KEYS",
    "KEY_IDS",
    "PAD_ID",
    "PROBE_NAMES",
    "PROSE",
    "SHORTEST_TOKENS",
    "STYLES",
    "VALUES",
    "VALUE_IDS",
    "WORDS",
    "WORDS_PER_CLASS",
    "CompletionProbe",
    "Ids",
    "OwnPrompt",
    "Probe",
    "ProbeSettings",
    "Prompt",
    "RecordStyle",
    "RecordsProbe",
    "Tokenizer",
    "build_probe",
    "has_closed_vocabulary",
    "pick_style",
    "piece_ids",
    "prose_ids",
    "read_prompt",
    "single_token_words",
]


def build_probe(settings: ProbeSettings, tokenizer: Tokenizer) -> Probe:
    """Build the probe that the settings name.

    Args:
        settings: what the user chose.
        tokenizer: of the target.

    Returns:
        The probe; its prompts are a pure function of both arguments.

    Raises:
        IsophaseError: the settings do not fit together, or the tokenizer does not suit the probe.
    """
    if settings.probe == "completion":
        return CompletionProbe(settings, tokenizer)
    return RecordsProbe(settings, tokenizer)
