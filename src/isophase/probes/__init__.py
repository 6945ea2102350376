"""Prompts in which only the phase of the queried fact moves."""

from __future__ import annotations

from typing import get_args

from isophase.probes.completion import CompletionProbe
from isophase.probes.prompt import Probe, Prompt, Tokenizer
from isophase.probes.records import RecordsProbe
from isophase.probes.settings import ProbeName, ProbeSettings
from isophase.probes.styles import STYLES, RecordStyle, pick_style

PROBE_NAMES: tuple[str, ...] = get_args(ProbeName)

__all__ = [
    "PROBE_NAMES",
    "STYLES",
    "CompletionProbe",
    "Probe",
    "ProbeSettings",
    "Prompt",
    "RecordStyle",
    "RecordsProbe",
    "Tokenizer",
    "build_probe",
    "pick_style",
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
