"""A target without a model, whose phase effect is known: for checking audits, and for trying them out."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Literal, get_args, get_type_hints

from isophase.errors import IsophaseError
from isophase.probes import KEYS, PAD_ID, VALUES, WORDS, WORDS_PER_CLASS, Prompt
from isophase.specs import read_settings
from isophase.targets.base import Answer, TargetDefaults
from isophase.targets.strides import Grid

Shape = Literal["cosine", "single", "square"]

SCHEME = "planted:"
_SPEC_NAMES = {"noise": "item_noise"}
_CURVE_WAVES = 3
_CURVE_WAVELENGTHS = (12.0, 400.0)
_SMALLEST_PROBABILITY = 1e-9
"""Keeps logarithms finite."""


class WordTokenizer:
    """One id per whitespace-separated word: the bundled layout, then the rest of the word lists.

    Unknown words become `<pad>`.
    """

    prefix_ids: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._words = [*WORDS, *KEYS[WORDS_PER_CLASS:], *VALUES[WORDS_PER_CLASS:]]
        self._ids = {word: number for number, word in enumerate(self._words)}

    def encode(self, text: str) -> list[int]:
        """Ids of the words of `text`."""
        return [self._ids.get(word, PAD_ID) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        """Words of `ids`, separated by spaces."""
        return " ".join(self._words[number] for number in ids)


@dataclass(frozen=True, kw_only=True)
class PlantedTarget:
    """Answers rightly with a probability that depends on the position of the queried record.

    Answers are a pure function of the fields and the prompt: neither order nor batch matters.

    Attributes:
        period: of the effect, in tokens, >= 2.
        amplitude: half of the difference between the best and the worst residue, 0..0.5; 0 plants nothing.
        shape: `cosine` (best at residue 0), `single` (only the last residue is bad) or `square` (the
            second half of the residues is bad).
        accuracy: midway between the best and the worst residue, 0..1.
        trend: change of accuracy per 1,000 tokens of depth, counted from the middle of the prompt.
        item_noise: standard deviation of a smooth random curve along the positions that each item has
            for itself, 0..0.5; where the sum leaves 0..1 it is clipped.
        errors: share of prompts that yield an error, 0..1.
        seed: of all draws, >= 0.

    Raises:
        IsophaseError: a field is out of range, or accuracy +- amplitude leaves 0..1.
    """

    period: int = 8
    amplitude: float = 0.1
    shape: Shape = "cosine"
    accuracy: float = 0.8
    trend: float = 0.0
    item_noise: float = 0.0
    errors: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        ranges: dict[str, tuple[float, float]] = {
            "period": (2, 1_000_000),
            "amplitude": (0, 0.5),
            "accuracy": (0, 1),
            "trend": (-1000, 1000),
            "item_noise": (0, 0.5),
            "errors": (0, 1),
            "seed": (0, 2**63 - 1),
        }
        for field_name, (low, high) in ranges.items():
            value = getattr(self, field_name)
            if not low <= value <= high:
                shown = {full: short for short, full in _SPEC_NAMES.items()}.get(field_name, field_name)
                raise IsophaseError(f"{SCHEME} {shown}={value} is out of range.", f"Use a value from {low} to {high}.")
        if self.shape not in get_args(Shape):
            raise IsophaseError(
                f"{SCHEME} shape={self.shape} is unknown.", f"Use one of: {', '.join(get_args(Shape))}."
            )
        slack = min(self.accuracy, 1 - self.accuracy)
        if self.amplitude > slack + 1e-12:
            raise IsophaseError(
                f"{SCHEME} accuracy={self.accuracy} with amplitude={self.amplitude} leaves the range 0 to 1.",
                f"Use amplitude={slack:.4g} or less.",
            )

    @classmethod
    def from_spec(cls, spec: str) -> PlantedTarget:
        """Read a target from a command-line spec.

        Args:
            spec: such as `planted:period=8,amplitude=.1,shape=single`; `planted:` alone gives the
                defaults. Keys are the fields' names, `noise` for `item_noise`.

        Returns:
            The target.

        Raises:
            IsophaseError: a key is unknown or given twice, or a value is no number or out of range.
        """
        hints = get_type_hints(cls)
        known = {field.name: field.name for field in fields(cls) if field.name not in _SPEC_NAMES.values()}
        known |= _SPEC_NAMES
        chosen: dict[str, int | float | str] = {}
        given = read_settings(spec.removeprefix(SCHEME), known=list(known), what=SCHEME)
        for key, text in given.items():
            kind = hints[known[key]]
            convert = kind if kind in (int, float) else str
            try:
                chosen[known[key]] = convert(text)
            except ValueError:
                noun = "a whole number" if convert is int else "a number"
                raise IsophaseError(f"{SCHEME} {key}={text} is not {noun}.", f"Write {noun}.") from None
        return cls(**chosen)  # type: ignore[arg-type]  # converted above, checked in __post_init__

    @property
    def name(self) -> str:
        """The spec that rebuilds this target."""
        short = {full: key for key, full in _SPEC_NAMES.items()}
        values = (f"{short.get(key, key)}={value}" for key, value in asdict(self).items())
        return SCHEME + ",".join(values)

    @cached_property
    def tokenizer(self) -> WordTokenizer:
        """A closed vocabulary that starts like the bundled one."""
        return WordTokenizer()

    @property
    def grids(self) -> list[Grid]:
        """The planted period, as a configuration would name it; empty when nothing is planted."""
        return [Grid(stride_tokens=self.period, kind="payload", setting="planted")] if self.amplitude else []

    @property
    def max_length_tokens(self) -> int | None:
        """No limit."""
        return None

    @property
    def grouped(self) -> bool:
        """Order does not matter."""
        return False

    @property
    def defaults(self) -> TargetDefaults:
        """Few records in a short prompt: nothing is read, so nothing needs to be long."""
        return TargetDefaults(records=8, length_tokens=256)

    def fingerprint(self) -> str:
        """The spec says everything."""
        return hashlib.sha256(self.name.encode()).hexdigest()[:16]

    def describe(self) -> dict[str, object]:
        """All fields."""
        return {"kind": "planted", **asdict(self)}

    def answer(self, prompts: Sequence[Prompt]) -> Iterator[Answer]:
        """Answer prompts.

        Args:
            prompts: any number.

        Yields:
            One answer per prompt, in their order.
        """
        for prompt in prompts:
            yield self._answer(prompt)

    def probability(self, prompt: Prompt) -> float:
        """Chance of a right answer.

        Args:
            prompt: only its length, item and `position_tokens` count.

        Returns:
            A probability in 0..1.
        """
        position = prompt.position_tokens
        expected = self.accuracy + self.amplitude * self._wave(position % self.period)
        expected += self.trend * (position - len(prompt.ids) / 2) / 1000
        expected += self.item_noise * self._curve(prompt.item, position)
        return min(1.0, max(0.0, expected))

    def _answer(self, prompt: Prompt) -> Answer:
        digest = hashlib.blake2b(prompt.ids.tobytes(), digest_size=8).hexdigest()
        error_draw, answer_draw, word_draw = self._uniforms(f"answer {prompt.item} {prompt.column} {digest}")
        if error_draw < self.errors:
            return Answer(status="error", correct=False, log_probability=math.nan, detail="an error planted on purpose")
        right = self.probability(prompt)
        correct = answer_draw < right
        wrong = sorted(prompt.valid_first_ids - set(prompt.answer_ids[:1]))
        wrong_ids = (wrong[int(word_draw * len(wrong))], *prompt.answer_ids[1:]) if wrong else ()
        share = (1 - right) / max(1, len(prompt.choices))
        return Answer(
            status="ok",
            correct=correct,
            log_probability=math.log(max(right, _SMALLEST_PROBABILITY)),
            output_ids=prompt.answer_ids if correct else wrong_ids,
            choice_log_probabilities=(math.log(max(share, _SMALLEST_PROBABILITY)),) * len(prompt.choices),
        )

    def _wave(self, residue: int) -> float:
        """The planted effect in -1..1."""
        if self.shape == "cosine":
            return math.cos(2 * math.pi * residue / self.period)
        bad = residue == self.period - 1 if self.shape == "single" else residue >= self.period / 2
        return -1.0 if bad else 1.0

    def _curve(self, item: int, position_tokens: int) -> float:
        """An item's own smooth curve: waves of random length and phase, standard deviation 1."""
        if not self.item_noise:
            return 0.0
        low, high = _CURVE_WAVELENGTHS
        total = 0.0
        for wave in range(_CURVE_WAVES):
            length_draw, phase_draw, _ = self._uniforms(f"curve {item} {wave}")
            wavelength = low * (high / low) ** length_draw
            total += math.cos(2 * math.pi * (position_tokens / wavelength + phase_draw))
        return total * math.sqrt(2 / _CURVE_WAVES)

    def _uniforms(self, what: str) -> tuple[float, float, float]:
        """Three numbers in [0, 1) that depend on the seed and `what` alone."""
        bits = hashlib.blake2b(f"{self.seed} {what}".encode(), digest_size=24).digest()
        first, second, third = (int.from_bytes(bits[k : k + 8], "big") >> 11 for k in (0, 8, 16))
        return first / 2**53, second / 2**53, third / 2**53
