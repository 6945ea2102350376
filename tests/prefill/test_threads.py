"""Heads side by side: the same result on any number of threads, and nothing of it left; looking that does not pay."""

from __future__ import annotations

import pytest
import torch

from isophase.prefill import (
    Adaptive,
    Auto,
    Costs,
    Geometry,
    Sampling,
    Settings,
    attend_reference,
    attend_row,
    full_plan,
)
from isophase.prefill.choose.ledger import Ledger
from isophase.prefill.execution.threads import side_by_side, threads, threads_by_piece


def settings(costs: Costs | None = None) -> Settings:
    return Settings(policy=Auto(mode=Adaptive()), sampling=Sampling(), costs=costs)


@pytest.mark.parametrize("number", [1, 2, 3, 8])
def test_threads_do_not_change_the_result(planted, number) -> None:
    columns = torch.tensor([0, 3, 400])
    query, key, value = planted(1500, columns=columns, distance=600, width=32)
    with threads(1):
        expected, _ = attend_row(query, key, value, settings())
    with threads(number), torch.inference_mode():
        found, call = attend_row(query, key, value, settings())
        assert torch.get_num_threads() == number
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert len(call.heads) == len(query)
    assert set(call.seconds) >= {"look", "choose"}


def test_heads_for_which_it_does_not_pay_are_dense_in_parts() -> None:
    """Costs by which nothing pays: the result is dense attention's, and looking was for nothing."""
    query, key, value = torch.randn(3, 5000, 16), torch.randn(1, 5100, 16), torch.randn(1, 5100, 16)
    costs = Costs(dense=1e-9, blocked=1.0, looked=1e-3, looked_token=0.0)
    plan = full_plan(3, 5100, first_query=100)
    for number in (1, 2):
        with threads(number):
            found, call = attend_row(query, key, value, settings(costs))
        torch.testing.assert_close(found, attend_reference(query, key, value, plan), rtol=1e-4, atol=1e-5)
        assert (call.why, call.saved < 0) == ("no head pays", True)
        assert call.saved == pytest.approx(-costs.look_share(Geometry(tokens=5100, first_query=100)))


def test_results_keep_their_order_and_faults_come_through() -> None:
    with threads(4):
        with side_by_side(9) as crew:
            assert torch.get_num_threads() == 1
            assert crew.map(lambda n: n * n, range(9)) == [n * n for n in range(9)]
            with torch.no_grad():
                assert crew.map(lambda _: torch.is_grad_enabled(), range(4)) == [False] * 4
            with pytest.raises(ZeroDivisionError):
                crew.map(lambda n: 1 / n, [1, 0])
        assert torch.get_num_threads() == 4
        assert [threads_by_piece(n) for n in (1, 2, 3, 9)] == [4, 2, 1, 1]
        with side_by_side(2) as crew:
            assert crew.map(lambda _: torch.get_num_threads(), range(2)) == [2, 2]


def test_what_does_not_pay_is_given_up_and_tried_again_on_the_next_prompt() -> None:
    ledger = Ledger(layers=30)  # may owe .6 of one layer
    shape = (1, 9, 8192, 8192)
    opened = []
    for layer in range(30):
        opened.append(ledger.is_open(layer, shape))
        if opened[-1]:
            ledger.book(-0.15)
    assert opened == [True] * 5 + [False] * 25
    assert ledger.is_open(0, shape)  # the next prompt
    ledger.book(-1.0)
    assert not ledger.is_open(1, shape)
    assert ledger.is_open(2, (1, 9, 4096, 4096))  # another one
    ledger.book(0.5)
    ledger.book(-0.3)
    assert ledger.is_open(3, (1, 9, 4096, 4096))


def test_a_model_whose_prompts_are_dense_is_left_to_its_own_attention(make_model, random_ids, monkeypatch) -> None:
    from isophase.prefill import attach, sparse_prefill

    costs = Costs(dense=1e-9, blocked=1.0, looked=1e-4, looked_token=0.0)
    monkeypatch.setattr(attach, "costs_of", lambda *_: costs)
    monkeypatch.setattr(Costs, "threshold_tokens", lambda *_: 256)
    model, ids = make_model(), random_ids(700)
    with torch.inference_mode(), sparse_prefill(model) as run:
        found = model(ids).logits
    assert run.calls[0].why == "no head pays"
    assert "given up" in run.calls[1].why
    with torch.inference_mode():
        torch.testing.assert_close(found, model(ids).logits, rtol=1e-4, atol=1e-4)
