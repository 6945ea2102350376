"""The one grammar of specs."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isophase.errors import IsophaseError
from isophase.specs import base_of, model_spec, read_call, read_settings, read_spec, refuse_strangers


@pytest.mark.parametrize(
    ("text", "kind", "place", "calls"),
    [
        ("isophase:w8s8", "isophase", "w8s8", ()),
        ("isophase:w8s8|vote(8)", "isophase", "w8s8", ("vote(8)",)),
        ("hf:a/b", "hf", "a/b", ()),
        ("hf:/models/x | chunkkv(budget=128)", "hf", "/models/x ", ("chunkkv(budget=128)",)),
        ("hf:x|prefill(block_sparse(windows=8))|vote(2)", "hf", "x", ("prefill(block_sparse(windows=8))", "vote(2)")),
        ("hf:C:/models/x", "hf", "C:/models/x", ()),
        ("http://h:8000/v1#m|vote(0:8, majority)", "server", "http://h:8000/v1#m", ("vote(0:8, majority)",)),
        ("planted:", "planted", "", ()),
        ("planted:period=4,amplitude=.3", "planted", "period=4,amplitude=.3", ()),
    ],
)
def test_a_spec_has_a_place_and_calls(text, kind, place, calls) -> None:
    read = read_spec(text)
    assert (read.kind, read.place, read.calls) == (kind, place, calls)
    assert base_of(text) == read.base
    assert read.is_local == (kind in ("isophase", "hf"))


def test_a_server_has_a_url_and_a_model() -> None:
    read = read_spec("http://h:8000/v1#org/model")
    assert (read.url, read.model) == ("http://h:8000/v1", "org/model")


@pytest.mark.parametrize("text", ["", "gpt", "hf:", "isophase:", "planted", "http:h", "ftp://h/x", "|chunkkv"])
def test_what_is_no_place_is_refused_in_one_line(text) -> None:
    with pytest.raises(IsophaseError, match="unknown target") as caught:
        read_spec(text)
    assert "A target is isophase:NAME, hf:PATH_OR_ID" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_behind_a_bar_is_refused() -> None:
    with pytest.raises(IsophaseError, match="nothing behind a bar"):
        read_spec("hf:x|")


@pytest.mark.parametrize(
    ("text", "name", "values", "settings"),
    [
        ("full", "full", (), {}),
        ("local-max(32)", "local-max", (32,), {}),
        ("vote(0:8:16, mean-probability)", "vote", ("0:8:16", "mean-probability"), {}),
        ("snapkv(budget=(64, 32), pooling=max)", "snapkv", (), {"budget": (64, 32), "pooling": "max"}),
        ("x(a='0:8', b=.5, c=None, d=-1)", "x", (), {"a": "0:8", "b": 0.5, "c": None, "d": -1}),
    ],
)
def test_calls(text, name, values, settings) -> None:
    call = read_call(text, what="thing", example="x(1)")
    assert (call.name, call.values, dict(call.settings)) == (name, values, settings)


@pytest.mark.parametrize("text", ["", "a b", "x(", "x(**{})", "x(__import__('os'))", "a.b(1)", "x(1)(2)", "x\x00"])
def test_what_is_no_call_is_refused(text) -> None:
    with pytest.raises(IsophaseError, match="cannot read the thing") as caught:
        read_call(text, what="thing", example="x(1)")
    assert str(caught.value).endswith("Write it like x(1).")


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text) -> None:
    for read in (read_spec, model_spec, lambda t: read_call(t, what="thing", example="x(1)")):
        with contextlib.suppress(IsophaseError):
            read(text)


def test_a_folder_stands_for_itself() -> None:
    assert model_spec("models/x").text == "hf:models/x"
    assert model_spec("isophase:full").kind == "isophase"


def test_settings() -> None:
    assert read_settings("a=1, b=x", known=["a", "b"], what="planted:") == {"a": "1", "b": "x"}
    for text, words in [("c=1", "keys from: a, b"), ("a", "cannot read 'a'"), ("a=1,a=2", "given twice")]:
        with pytest.raises(IsophaseError, match=words):
            read_settings(text, known=["a", "b"], what="planted:")


def test_strangers_are_named() -> None:
    refuse_strangers("x", ["a"], ["a"])
    with pytest.raises(IsophaseError, match=r"x has no setting 'c'\. It has a, b"):
        refuse_strangers("x", ["a", "c"], ["a", "b"])
