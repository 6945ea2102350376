"""What a user chooses about a probe."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

ProbeName = Literal["records", "prefix", "in-sequence", "completion"]
StyleName = Literal["auto", "pairs", "sentences", "compact"]


class ProbeSettings(BaseModel):
    """Everything that, together with the tokenizer, determines all prompts of a probe.

    Attributes:
        probe: which family of prompts; `completion` brings its own items, columns and length and
            uses none of the other settings.
        items: number of items (sets of records with one question each).
        records: records in each prompt, the queried one included.
        length_tokens: exact length of every prompt, start-of-text and question included.
        window_tokens: positions that the queried record takes, one token apart; a multiple of every
            period that is to be tested.
        seed: of all random choices.
        demonstrations: questions about other records, with their answers, before the final question.
        key_tokens: tokens of a key.
        value_tokens: tokens of a value.
        style: how records and questions are written (see `styles`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    probe: ProbeName
    items: int = Field(ge=1)
    records: int = Field(ge=1)
    length_tokens: int = Field(ge=1)
    window_tokens: int = Field(ge=2)
    seed: int = Field(ge=0)
    demonstrations: int = Field(default=0, ge=0)
    key_tokens: int = Field(default=1, ge=1, le=4)
    value_tokens: int = Field(default=1, ge=1, le=4)
    style: StyleName = "auto"
