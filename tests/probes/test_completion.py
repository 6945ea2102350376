from __future__ import annotations

import re

import pytest

from isophase.errors import IsophaseError
from isophase.probes import PROBE_NAMES, Probe, ProbeSettings, build_probe
from isophase.probes.completion import HEAD, TAIL

SETTINGS = ProbeSettings(probe="completion", items=1, records=1, length_tokens=1, window_tokens=2, seed=0)


def test_filler_grows_by_one_token_and_reads_as_text(bpe):
    probe = build_probe(SETTINGS, bpe)
    assert (probe.items, probe.window_tokens, len(probe)) == (4, 16, 64)
    assert len(set(probe.families)) == 4
    prompts = list(probe)
    for prompt in prompts:
        filler_tokens = 24 + prompt.column
        assert len(prompt.ids) == len(prompts[0].ids) + prompt.column
        text = bpe.decode(prompt.ids[1:].tolist())
        assert text == HEAD + probe.families[prompt.item] * filler_tokens + TAIL
        assert bpe.decode(prompt.ids[prompt.position_tokens :].tolist()) == TAIL
        assert bpe.decode(prompt.answer_ids) == "8"
        assert [bpe.decode(choice) for choice in prompt.choices] == ["32"]
    assert sorted(p.position_tokens % 16 for p in prompts[:16]) == list(range(16))
    assert (probe.prompt(37).ids == prompts[37].ids).all()


def test_right_answer_is_eight_and_the_code_is_valid():
    compile(HEAD + TAIL + "8_e4m3fn)\n    return quantised, scale\n", "probe", "exec")
    assert TAIL.endswith("quantised = scaled.to(torch.float")
    assert TAIL.count("float32") == 3
    assert "The quantised matrix (torch.float8_e4m3fn)" in TAIL


def test_a_character_that_is_no_token_is_passed_over(bpe):
    class WithoutDash:
        prefix_ids = bpe.prefix_ids
        decode = staticmethod(bpe.decode)

        @staticmethod
        def encode(text):
            return bpe.encode(text.replace("a-", "a<>") if text == "a-" else text)

    assert "-" in build_probe(SETTINGS, bpe).families
    families = build_probe(SETTINGS, WithoutDash()).families
    assert "-" not in families
    assert len(families) == 4


def test_too_few_characters_is_an_error(bpe):
    class LosingRuns:
        prefix_ids = bpe.prefix_ids
        encode = staticmethod(bpe.encode)

        @staticmethod
        def decode(ids):
            return re.sub(r"([^\w\s])\1{20,}", "", bpe.decode(ids))

    with pytest.raises(IsophaseError, match=r"does not apply: it needs 4 decorative.*has 1 of"):
        build_probe(SETTINGS, LosingRuns())


def test_does_not_apply_to_closed_vocabularies(closed):
    with pytest.raises(IsophaseError, match=r"completion probe does not apply.*--probe records"):
        build_probe(SETTINGS, closed)


def test_probes_satisfy_the_protocol(closed, bpe):
    for name in PROBE_NAMES:
        fields = SETTINGS.model_dump() | {"probe": name, "length_tokens": 200}
        probe: Probe = build_probe(ProbeSettings(**fields), bpe)
        assert probe.name == name
        assert len(list(probe)) == len(probe) == probe.items * probe.window_tokens
