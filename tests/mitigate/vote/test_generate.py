"""Votes over shifts: combination rules, exact early stops, generation, and the audit of a voted model."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isophase.errors import IsophaseError
from isophase.mitigate.specs import open_target, vote_suffix
from isophase.mitigate.vote.generate import PhaseVote, combine_logits, insert_neutral, is_settled
from isophase.mitigate.vote.rules import RULES
from isophase.mitigate.vote.shifts import neutral_ids
from isophase.models.config import CompressedQwen3Config
from isophase.models.qwen3 import CompressedQwen3ForCausalLM

VOCABULARY = 23


@pytest.fixture(scope="module")
def model() -> CompressedQwen3ForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        config = CompressedQwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            local_window=3,
            compression_window=4,
            compression_stride=4,
            initializer_range=0.3,
            embedding_range=1.0,
            pad_token_id=0,
        )
        return CompressedQwen3ForCausalLM(config).eval()


def text(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def slow_combine(p_SV: np.ndarray, rule: str) -> np.ndarray:
    """From the definition, for one row."""
    if rule == "mean-probability":
        return p_SV.mean(axis=0)
    if rule == "mean-log-probability":
        product = np.exp(np.log(p_SV).mean(axis=0))
        return product / product.sum()
    if rule == "confidence":
        weight = p_SV.max(axis=1, keepdims=True)
        return (weight * p_SV).sum(axis=0) / weight.sum()
    votes = np.bincount(p_SV.argmax(axis=1), minlength=p_SV.shape[1])
    mixed = votes + 0.5 * p_SV.mean(axis=0)
    return mixed / mixed.sum()


def draw_logits(lanes: int, rows: int, seed: int) -> torch.Tensor:
    return 4 * torch.randn(lanes, rows, 6, generator=torch.Generator().manual_seed(seed))


@given(st.sampled_from(RULES), st.integers(1, 6), st.integers(0, 10_000))
def test_rules_equal_their_definitions(rule: str, lanes: int, seed: int) -> None:
    logits = draw_logits(lanes, 3, seed)
    found = combine_logits(logits, rule).exp().numpy()
    p = torch.softmax(logits, dim=-1).double().numpy()
    for row in range(3):
        np.testing.assert_allclose(found[row], slow_combine(p[:, row], rule), rtol=1e-4, atol=1e-6)
        assert math.isclose(found[row].sum(), 1, rel_tol=1e-5)


@settings(max_examples=300)
@given(st.sampled_from(RULES), st.integers(1, 7), st.integers(0, 5), st.integers(0, 10_000), st.integers(0, 10_000))
def test_a_settled_vote_never_changes(rule: str, spoken: int, missing: int, seed: int, other: int) -> None:
    said = draw_logits(spoken, 1, seed)
    if not is_settled(said, missing, rule):
        return
    for adversary in range(6):
        certain = torch.full((missing, 1, 6), -50.0)
        certain[:, 0, adversary] = 50.0
        for rest in (certain, draw_logits(missing, 1, other)):
            every = combine_logits(torch.cat([said, rest]), rule)
            assert torch.equal(every.argmax(-1), combine_logits(said, rule).argmax(-1))


def test_agreement_settles_just_over_half_way() -> None:
    certain = torch.full((8, 1, 6), -50.0)
    certain[..., 2] = 50.0
    settled = [n for n in range(1, 9) if is_settled(certain[:n], 8 - n, "majority")]
    assert settled[0] == 5
    assert is_settled(certain[:5], 3, "mean-probability")
    assert not is_settled(certain[:7], 1, "mean-log-probability")


def test_neutral_tokens_go_where_they_are_told() -> None:
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert insert_neutral(ids, 3, 1, [8, 9]).tolist() == [[1, 8, 9, 8, 2, 3], [4, 8, 9, 8, 5, 6]]
    assert torch.equal(insert_neutral(ids, 0, 2, [8]), ids)


def slow_vote(model, ids, shifts, at, neutral, rule, new_tokens):
    """Greedy, one row, no cache: every lane is read whole for every token."""
    out = ids
    for _ in range(new_tokens):
        with torch.no_grad():
            said = [model(insert_neutral(out, s, at, neutral), use_cache=False).logits[:, -1] for s in shifts]
        out = torch.cat([out, combine_logits(torch.stack(said), rule).argmax(-1, keepdim=True)], dim=1)
    return out


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("early_stop", [True, False])
def test_generation_equals_reading_every_lane_again(model, rule: str, early_stop: bool) -> None:
    shifts, neutral = (0, 1, 2, 3), [7]
    vote = PhaseVote(model, shifts, neutral, rule=rule, early_stop=early_stop)
    for seed in range(3):
        ids = text(1, 15, seed)
        found = vote.generate(ids, at=2, max_new_tokens=10, do_sample=False, eos_token_id=None)
        assert torch.equal(found, slow_vote(model, ids, shifts, 2, neutral, rule, 10))
        assert vote.cost.steps == 10
        assert vote.cost.prompt_tokens <= 3 * 15 + 6
        if not early_stop or rule == "mean-log-probability":
            assert vote.cost.lane_steps == 30
            assert vote.cost.decoded_tokens == 27
    assert "4 shifts" in str(vote.cost)


def test_a_batch_equals_its_rows(model) -> None:
    vote = PhaseVote(model, (0, 2, 3), [7])
    ids = text(3, 15)
    how = {"at": 1, "max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    together = vote.generate(ids, **how)
    for row in range(3):
        assert torch.equal(together[row : row + 1], vote.generate(ids[row : row + 1], **how))


def test_beams_samples_and_attention_masks(model) -> None:
    vote = PhaseVote(model, (0, 1, 3), [7])
    ids = text(2, 15)
    mask = torch.ones_like(ids)
    how = {"attention_mask": mask, "max_new_tokens": 8, "eos_token_id": None}
    greedy = vote.generate(ids, do_sample=False, **how)
    beams = vote.generate(ids, num_beams=3, do_sample=False, **how)

    def score(sequences: torch.Tensor) -> float:
        total = 0.0
        for end in range(15, 23):
            with torch.no_grad():
                said = [model(insert_neutral(sequences[:, :end], s, 0, [7])).logits[:, -1] for s in (0, 1, 3)]
            total += float(combine_logits(torch.stack(said), vote.rule).gather(1, sequences[:, end : end + 1]).sum())
        return total

    assert score(beams) >= score(greedy) - 1e-4
    torch.manual_seed(0)
    sampled = vote.generate(ids, do_sample=True, num_return_sequences=3, **how)
    assert sampled.shape == (6, 23)
    # Every lane was asked for every token, as sampling needs whole distributions.
    assert vote.cost.lane_steps == 2 * 8


def test_one_lane_is_plain_generation(model) -> None:
    ids = text(2, 15)
    plain = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert torch.equal(
        PhaseVote(model, (0,), [7]).generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None), plain
    )


def test_the_lanes_do_not_read_what_the_prompt_shares_twice_wrongly(model) -> None:
    # A vote of one prompt leaves nothing behind for the next.
    vote = PhaseVote(model, (0, 1), [7])
    first = vote.generate(text(1, 12), max_new_tokens=5, do_sample=False, eos_token_id=None)
    vote.generate(text(1, 20, 3), max_new_tokens=5, do_sample=False, eos_token_id=None)
    again = vote.generate(text(1, 12), max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert torch.equal(first, again)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda m: PhaseVote(m, (1, 2), [7]), "begin with 0"),
        (lambda m: PhaseVote(m, (0, 2, 2), [7]), "be different"),
        (lambda m: PhaseVote(m, (0,), []), "at least one neutral"),
        (lambda m: PhaseVote(m, (0,), [7], rule="best"), "'best' is unknown"),
        (lambda m: PhaseVote(m, (0, 1), [7]).generate(text(1, 5), at=6), "outside the prompt of 5"),
        (
            lambda m: PhaseVote(m, (0, 1), [7]).generate(text(1, 3), attention_mask=torch.tensor([[0, 1, 1]])),
            "without padding",
        ),
        (
            lambda m: PhaseVote(m, (0, 1), [7]).generate(
                torch.tensor([[5, 6, 5, 6, 5, 6, 5]]), prompt_lookup_num_tokens=3, max_new_tokens=6, eos_token_id=None
            ),
            "cannot",
        ),
    ],
)
def test_what_cannot_be_voted_on_is_refused(model, make, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(model)


def test_specs() -> None:
    assert vote_suffix("8") == "|vote(8)"
    assert vote_suffix("0,8,16 majority") == "|vote(0:8:16, majority)"
    for wrong in ("", "x", "8 best", "1.5", "-1"):
        with pytest.raises(IsophaseError, match="--vote is"):
            vote_suffix(wrong)
    target = open_target("isophase:w8s8|vote(4)")
    assert target.shifts == (0, 2, 4, 6)  # spread over the stride of 8
    assert target.max_length_tokens == 512 - 6
    assert open_target("isophase:w8s8|vote(0:8:16, majority)").rule == "majority"
    assert target.fingerprint() != open_target("isophase:w8s8|vote(2)").fingerprint()
    assert neutral_ids(target.tokenizer)
    for wrong in ("isophase:w8s8|vote(8:0)", "isophase:w8s8|vote(0:0)", "isophase:w8s8|vote(2, best)"):
        with pytest.raises(IsophaseError, match="shifts must be"):
            open_target(wrong)
    with pytest.raises(IsophaseError, match="cannot vote"):
        open_target("planted:period=4|vote(8)")


def test_voting_over_the_stride_cures_and_multiples_of_it_do_not() -> None:
    from isophase.probes import build_probe
    from isophase.probes.settings import ProbeSettings

    plain = open_target("isophase:w8s8")
    probe = build_probe(
        ProbeSettings(probe="records", style="pairs", records=24, length_tokens=114, items=8, window_tokens=8, seed=0),
        plain.tokenizer,
    )
    prompts = [probe.prompt(row) for row in range(len(probe))]
    edge = [number for number, prompt in enumerate(prompts) if prompt.position_tokens % 8 == 7]

    def accuracy(spec: str) -> tuple[float, float]:
        right = [answer.correct for answer in open_target(spec).answer(prompts)]
        return float(np.mean(right)), float(np.mean([right[n] for n in edge]))

    before, voted, control = (accuracy(f"isophase:w8s8{tail}") for tail in ("", "|vote(8)", "|vote(0:8:16)"))
    assert before[1] < 0.6
    assert voted[1] > 0.9
    assert control[1] < before[1] + 0.2


def test_options_make_specs() -> None:
    from isophase.cli.options import DEFAULT_TARGETS, with_variants

    assert with_variants(["hf:a", "planted:period=4"], None, ["1", "4", "0,8 majority"]) == [
        "hf:a",
        "hf:a|vote(4)",
        "hf:a|vote(0:8, majority)",
        "planted:period=4",
    ]
    assert with_variants(None, None, ["2"]) == [f"{spec}|vote(2)" for spec in DEFAULT_TARGETS]
    with pytest.raises(IsophaseError, match="together"):
        with_variants(["hf:a"], ["full"], ["2"])
    with pytest.raises(IsophaseError, match="asks models and servers"):
        with_variants(["planted:period=4"], None, ["2"])
