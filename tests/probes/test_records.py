from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from isophase.errors import IsophaseError
from isophase.probes import ProbeSettings, build_probe

MODES = ("records", "prefix", "in-sequence")
STYLE_OF = {"closed": ("pairs", "auto"), "bpe": ("sentences", "compact", "auto")}


def make(tokenizer, **changes):
    fields = {
        "probe": "records",
        "items": 3,
        "records": 6,
        "length_tokens": 400,
        "window_tokens": 8,
        "seed": 0,
    }
    return build_probe(ProbeSettings(**{**fields, **changes}), tokenizer)


@st.composite
def settings_and_tokenizer(draw, modes=MODES):
    tokenizer = draw(st.sampled_from(sorted(STYLE_OF)))
    records = draw(st.integers(1, 12))
    return tokenizer, {
        "probe": draw(st.sampled_from(modes)),
        "items": draw(st.integers(1, 4)),
        "records": records,
        "length_tokens": draw(st.integers(360, 700)),
        "window_tokens": draw(st.integers(2, 16)),
        "seed": draw(st.integers(0, 1000)),
        "demonstrations": draw(st.integers(0, min(2, records - 1))),
        "key_tokens": draw(st.integers(1, 2)),
        "value_tokens": draw(st.integers(1, 2)),
        "style": draw(st.sampled_from(STYLE_OF[tokenizer])),
    }


@pytest.fixture(scope="session")
def tokenizer_named(closed, bpe):
    return {"closed": closed, "bpe": bpe}


quick = hypothesis_settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def question_tokens(probe) -> int:
    return (
        len(probe.style.question.ids)
        + len(probe.style.opening)
        + probe.settings.demonstrations * len(probe.style.shot.ids)
    )


def find(ids, part) -> list[int]:
    """All places where `part` stands in `ids`."""
    windows = np.lib.stride_tricks.sliding_window_view(np.asarray(ids), len(part))
    return np.flatnonzero((windows == np.asarray(part)).all(axis=1)).tolist()


def body(probe, prompt):
    return prompt.ids[len(probe.style.prologue) : len(prompt.ids) - question_tokens(probe)]


def queried_key(probe, prompt):
    at = prompt.position_tokens
    return prompt.ids[at : at + probe.settings.key_tokens]


def without_target(probe, prompt):
    start = prompt.position_tokens - probe.style.record.key_at[0]
    return np.delete(prompt.ids, slice(start, start + len(probe.style.record.ids)))


@quick
@given(case=settings_and_tokenizer())
def test_length_question_answer_and_residues(tokenizer_named, case):
    name, fields = case
    probe = make(tokenizer_named[name], **fields)
    style = probe.style
    prompts = list(probe)
    assert len(prompts) == len(probe) == fields["items"] * fields["window_tokens"]
    for row, prompt in enumerate(prompts):
        assert (prompt.item, prompt.column) == divmod(row, fields["window_tokens"])
        assert prompt.ids.dtype == np.int32
        assert len(prompt.ids) == fields["length_tokens"]
        key = queried_key(probe, prompt)
        values = np.array([prompt.answer_ids], dtype=np.int32)
        # The record at `position_tokens` holds the answer, and the last question asks for its key.
        record = style.record.fill(key[None], values)[0]
        start = prompt.position_tokens - style.record.key_at[0]
        assert (prompt.ids[start : start + len(record)] == record).all()
        value_end = prompt.position_tokens + prompt.span_tokens
        assert tuple(prompt.ids[value_end - len(prompt.answer_ids) : value_end]) == prompt.answer_ids
        question = style.question.fill(key[None], values)[0]
        assert (prompt.ids[-len(question) :] == question).all()
        assert prompt.answer_ids[0] in prompt.valid_first_ids
        assert prompt.query_position_tokens == fields["length_tokens"] - 1
        again = probe.prompt(row)
        assert (again.ids == prompt.ids).all()
    for item in range(fields["items"]):
        mine = [p for p in prompts if p.item == item]
        m = fields["window_tokens"]
        assert sorted(p.position_tokens % m for p in mine) == list(range(m))
        assert [p.position_tokens - mine[0].position_tokens for p in mine] == list(range(m))
        assert len({p.answer_ids for p in mine}) == 1
        tail = question_tokens(probe)
        assert len({p.ids[-tail:].tobytes() for p in mine}) == 1


@quick
@given(case=settings_and_tokenizer(modes=("records",)))
def test_records_moves_the_queried_record_only(tokenizer_named, case):
    name, fields = case
    probe = make(tokenizer_named[name], **fields)
    for item in range(fields["items"]):
        rows = range(item * probe.window_tokens, (item + 1) * probe.window_tokens)
        assert len({without_target(probe, probe.prompt(row)).tobytes() for row in rows}) == 1


@quick
@given(case=settings_and_tokenizer(modes=("prefix",)))
def test_prefix_moves_all_records_together(tokenizer_named, case):
    name, fields = case
    probe = make(tokenizer_named[name], **fields)
    slack = probe.window_tokens - 1
    for row in range(len(probe)):
        first = body(probe, probe.prompt(row - row % probe.window_tokens))
        moved = body(probe, probe.prompt(row))
        column = row % probe.window_tokens
        block = first[: len(first) - slack]
        assert (moved[column : column + len(block)] == block).all()
        padding = np.concatenate([moved[:column], moved[column + len(block) :]])
        assert (padding == first[len(block) :]).all()


@quick
@given(case=settings_and_tokenizer(modes=("in-sequence",)))
def test_in_sequence_redraws_gaps_and_keeps_order(tokenizer_named, case):
    name, fields = case
    probe = make(tokenizer_named[name], **fields)
    reference = make(tokenizer_named[name], **{**fields, "probe": "records"})
    for item in range(fields["items"]):
        first = item * probe.window_tokens
        records = records_in_order(reference, first)
        fillers = set()
        for row in range(first, first + probe.window_tokens):
            prompt = probe.prompt(row)
            assert prompt.position_tokens == reference.prompt(row).position_tokens
            ids, is_filler, last = body(probe, prompt), None, -1
            is_filler = np.ones(len(ids), dtype=bool)
            for record in records:
                place = next(at for at in find(ids, record) if at > last)
                is_filler[place : place + len(record)] = False
                last = place
            fillers.add(ids[is_filler].tobytes())
        assert len(fillers) == 1


def records_in_order(probe, row):
    """The records of a `records` prompt, from the item that built it."""
    prompt = probe.prompt(row)
    item = probe._item(prompt.item)
    return [*item.left, item.target, *item.right]


def test_in_sequence_distractors_do_not_move_in_lockstep(closed):
    probe = make(closed, probe="in-sequence", items=1, records=10)
    item = probe._item(0)
    places = np.array([[find(p.ids, record)[0] for record in (*item.left, *item.right)] for p in probe])
    assert (np.diff(places, axis=0) != 1).any(axis=0).all()


def test_seeds(closed):
    first, again, other = make(closed, seed=5), make(closed, seed=5), make(closed, seed=6)
    order = [13, 2, 20, 2, 7]
    assert [first.prompt(row).ids.tobytes() for row in order] == [again.prompt(row).ids.tobytes() for row in order]
    assert all((first.prompt(row).ids != other.prompt(row).ids).any() for row in order)


def test_items_differ(closed):
    probe = make(closed, items=4)
    assert len({without_target(probe, probe.prompt(8 * item)).tobytes() for item in range(4)}) == 4


@pytest.mark.parametrize("mode", MODES)
def test_keys_and_values_are_distinct_and_shots_ask_for_others(closed, mode):
    probe = make(closed, probe=mode, records=64, demonstrations=5, length_tokens=200)
    for row in (0, 9, 23):
        prompt = probe.prompt(row)
        ids = body(probe, prompt).tolist()
        keys = [n for n in ids if n in set(probe.style.key_words.tolist())]
        values = [n for n in ids if n in set(probe.style.value_words.tolist())]
        assert len(set(keys)) == len(set(values)) == 64
        pairs = dict(zip(keys, values, strict=True))
        shots = prompt.ids[-question_tokens(probe) : -2].reshape(5, 3)
        key = queried_key(probe, prompt)[0]
        assert key not in shots[:, 1]
        assert len(set(shots[:, 1].tolist())) == 5
        assert all(pairs[asked] == value for _, asked, value in shots.tolist())
        assert pairs[key] == prompt.answer_ids[0]


def test_dense_prompts_fit_to_the_last_token(closed):
    needed = 20 * 2 + 7 + 1 + 2
    with pytest.raises(IsophaseError, match=r"20 records of 2 tokens need a prompt of 50 tokens") as caught:
        make(closed, records=20, length_tokens=needed - 1)
    assert "--length 50 or more, or --records 19 or fewer" in caught.value.remedy
    assert make(closed, records=19, length_tokens=needed - 1, items=20).prompt(5).ids.shape == (49,)
    probe = make(closed, records=20, length_tokens=needed, items=20)
    for prompt in probe:
        assert np.isin(prompt.ids, probe.style.key_words).sum() == 21


def test_targets_lie_deep_in_a_long_prompt_but_not_among_its_last_tokens(closed):
    probe = make(closed, items=40, length_tokens=2000)
    places = [probe.prompt(8 * item).position_tokens for item in range(40)]
    assert min(places) >= 0.53 * 2000
    assert max(places) <= 0.77 * 2000


@pytest.mark.parametrize("length", [140, 260, 400, 700])
def test_a_target_keeps_its_distance_from_the_question_where_there_is_room(closed, length):
    probe = make(closed, items=40, length_tokens=length)
    behind = [length - probe.prompt(8 * item + column).position_tokens for item in range(40) for column in (0, 7)]
    # The middle half of a short room; beyond that, 128 tokens.
    assert min(behind) >= min(length // 4, 128)


def test_bad_settings_say_what_to_do(closed, bpe):
    with pytest.raises(IsophaseError, match=r"500 records need as many distinct keys.*--key-tokens 2"):
        make(closed, records=500, length_tokens=3000)
    with pytest.raises(IsophaseError, match=r"6 demonstrations.*--demonstrations 5 or fewer"):
        make(closed, demonstrations=6)
    with pytest.raises(IsophaseError, match=r"--length \d+ or more\.$"):
        make(bpe, length_tokens=40)
    with pytest.raises(IndexError, match=r"row 24 is outside 0\.\.23"):
        make(closed).prompt(24)
    with pytest.raises(ValueError, match="window_tokens"):
        make(closed, window_tokens=1)


@pytest.mark.parametrize("mode", MODES)
def test_needle_of_16_000_records_in_128k_tokens(bpe, mode):
    probe = make(bpe, probe=mode, items=256, records=16_000, length_tokens=131_072, key_tokens=2, style="compact")
    assert len(probe) == 2048
    newline = probe.style.record.ids[-1]
    for row in (0, 1, 1027):
        prompt = probe.prompt(row)
        assert len(prompt.ids) == 131_072
        assert 0.34 < prompt.position_tokens / 131_072 < 0.66
        ends = np.flatnonzero(body(probe, prompt) == newline)
        records = body(probe, prompt)[ends[:, None] + np.arange(-3, 0)]
        assert len(ends) == 16_000
        assert len(np.unique(records[:, :2], axis=0)) == 16_000
        (asked,) = np.flatnonzero((records[:, :2] == queried_key(probe, prompt)).all(axis=1))
        assert records[asked, 2] == prompt.answer_ids[0]
    assert len(probe._cache) <= 2
