"""A server that votes, over real sockets: what is asked, what wins, what an audit of it finds."""

from __future__ import annotations

import math

import pytest
from fake_server import TOKENIZER, FakeServer

from isophase.errors import IsophaseError
from isophase.mitigate.specs import open_target
from isophase.probes import ProbeSettings, build_probe
from isophase.targets import ServerOptions

KINDS = ["vllm", "sglang", "llamacpp", "openai", "openai-text", "chat"]


@pytest.fixture
def voting(words_folder):
    """`voting(server, "8")`: the server, voting over 8 shifts."""

    def build(server, vote, **options):
        settings = ServerOptions(tokenizer=str(words_folder), **options)
        return open_target(f"{server.spec}|vote({vote})", server=settings)

    return build


def prompts(count=24, value_tokens=1):
    settings = ProbeSettings(
        probe="records", items=2, records=6, length_tokens=120, window_tokens=24, seed=0, value_tokens=value_tokens
    )
    probe = build_probe(settings, TOKENIZER)
    return [probe.prompt(row) for row in range(count)]


def weak(prompt):
    return prompt.position_tokens % 8 == 7


@pytest.mark.parametrize("kind", KINDS)
def test_shifts_over_the_period_cure_and_multiples_of_it_do_not(voting, kind):
    with FakeServer(kind, period=8, weak=7) as server:
        cured = list(voting(server, "8").answer(prompts()))
        control = list(voting(server, "0:8:16").answer(prompts()))
    assert all(answer.status == "ok" and answer.correct for answer in cured)
    assert [answer.correct for answer in control] == [not weak(prompt) for prompt in prompts()]
    for prompt, answer in zip(prompts(), control, strict=True):
        if kind != "chat":
            assert answer.log_probability == pytest.approx(math.log(0.05 if weak(prompt) else 0.9))


@pytest.mark.parametrize("rule", ["majority", "confidence", "mean-log-probability", "mean-probability"])
def test_rules(voting, rule):
    with FakeServer("vllm", period=2, weak=1) as server:
        answers = list(voting(server, f"0:1:2:4, {rule}").answer(prompts()))
    for prompt, answer in zip(prompts(), answers, strict=True):
        # Three of four shifts meet the parity of the unshifted prompt.
        assert answer.correct == (prompt.position_tokens % 2 == 0)
        values = [0.9, 0.05, 0.9, 0.9] if answer.correct else [0.05, 0.9, 0.05, 0.05]
        mean = math.log(math.prod(values)) / 4 if rule == "mean-log-probability" else math.log(sum(values) / 4)
        assert answer.log_probability == pytest.approx(mean)


def test_neutral_tokens_stand_behind_the_start_and_requests_stay_bounded(voting):
    with FakeServer("vllm", delay=0.01) as server:
        (prompt,) = prompts(1)
        list(voting(server, "0:3").answer([prompt]))
        sent = [body["prompt"] for body in server.bodies if len(body["prompt"]) > 100]
        assert sent[0] == prompt.ids.tolist()
        assert sent[1][3:] == prompt.ids.tolist()
        assert len(set(sent[1][:3])) == 1
        list(voting(server, "4", concurrency=3).answer(prompts()))
        assert server.most_in_flight == 3


def test_rivals_are_scored_by_teacher_forcing_where_the_server_can(voting):
    """Values of two tokens: behind a first token that differs, alternatives say nothing of the other answer."""
    with FakeServer("vllm", period=2, weak=0) as server:
        (prompt,) = prompts(1, value_tokens=2)
        (answer,) = voting(server, "0:1").answer([prompt])
        scored = [body["prompt"] for body in server.bodies if body.get("prompt_logprobs") is not None]
    # Both shifts are asked about what the other one said, and about the right answer.
    assert len(scored) >= 2
    assert {len(ids) for ids in scored} == {len(prompt.ids) + 2, len(prompt.ids) + 3}
    assert math.isfinite(answer.log_probability)


def test_chat_votes_by_majority_and_says_so(voting):
    with FakeServer("chat", period=8, weak=7) as server:
        target = voting(server, "4")
        list(target.answer(prompts(4)))
        about = target.describe()
        assert (about["vote_rule"], about["vote_shifts"]) == ("majority", [0, 1, 2, 3])
        # Positions move, although only texts are sent.
        assert not any("another length" in note for note in about["notes"])
        with pytest.raises(IsophaseError, match="needs log-probabilities"):
            list(voting(server, "4, confidence").answer(prompts(1)))


def test_flips_are_those_of_the_vote(voting):
    asked = prompts(48)
    with FakeServer("vllm", flips=True) as server:
        # Every second time a prompt is answered wrongly, at all of its shifts alike.
        answers = list(voting(server, "0:8").answer(asked))
    repeats = [answer.repeat_agrees for answer in answers if answer.repeat_agrees is not None]
    assert repeats
    assert not any(repeats)


def test_a_shift_that_fails_is_an_error_and_no_miss(voting, quick_retries):
    with FakeServer("vllm", faults={1: ["500", -1]}) as server:
        (answer,) = voting(server, "0:1", concurrency=1).answer(prompts(1))
    assert answer.status == "error"
    assert "500" in answer.detail


def test_room_for_shifts_and_fingerprints(voting):
    with FakeServer("vllm", limit=256) as server:
        assert voting(server, "0:5:9").max_length_tokens == 255 - 9
        prints = {voting(server, vote).fingerprint() for vote in ("2", "4", "4, majority")}
        assert len(prints) == 3


@pytest.mark.parametrize("vote", ["8:0", "0:0", "0", "2, best"])
def test_votes_that_cannot_be(vote):
    with pytest.raises(IsophaseError, match="shifts must be"):
        open_target(f"http://localhost:1/v1#m|vote({vote})")


@pytest.mark.slow
def test_a_real_server_votes_as_the_model_itself(vllm, smollm2_folder):
    """Of answers of one token the vote over whole answers is the vote token by token."""
    torch = pytest.importorskip("torch")
    from isophase.mitigate.specs import with_vote
    from isophase.targets.huggingface import HuggingFaceTarget

    vote = "|vote(0:1:3)"
    server = open_target(vllm.spec + vote)
    local = with_vote(HuggingFaceTarget(str(smollm2_folder), dtype=torch.float32), vote)
    settings = ProbeSettings(
        probe="records", items=2, records=4, length_tokens=96, window_tokens=4, demonstrations=1, seed=0
    )
    asked = list(build_probe(settings, server.tokenizer))
    for found, expected in zip(server.answer(asked), local.answer(asked), strict=True):
        assert (found.status, found.correct) == (expected.status, expected.correct)
        assert found.output_ids == expected.output_ids
        assert found.log_probability == pytest.approx(expected.log_probability, abs=2e-3)
    assert server.describe()["notes"] == []
