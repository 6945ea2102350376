"""Aligned texts: nothing is lost, code parses, JSON is equal, and no span that fits crosses a boundary."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

import isophase
from isophase.errors import IsophaseError
from isophase.mitigate.align.formats import find, format_of, meaning
from isophase.mitigate.align.text import LocatingTokenizer, align_text, apply, revert

SOURCE = Path(isophase.__file__).parent
CODE = (SOURCE / "audit" / "store.py").read_text()
PAGE = (SOURCE.parents[1] / "LICENSE").read_text()  # a page that does not change: what merges depends on it


@pytest.fixture(scope="module")
def bpe(tmp_path_factory) -> LocatingTokenizer:
    """A byte-level BPE trained on our own code, in which indents and blank lines are single tokens."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    inner.train_from_iterator([CODE, PAGE, *(" " * 2**n for n in range(5))] * 3, trainer)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    inner.save(str(path))
    return LocatingTokenizer(str(path))


CURVE = [0.9, 0.95, 0.94, 0.93, 0.96, 0.95, 0.94, 0.1]
# A number that merges with a blank may fill a whole chunk. Such a span fits at phase 0 only, which is then strong.
STRONG_START = [0.95, *CURVE[1:]]
TEXTS = st.lists(st.text("ab .,\t#é漢\U0001f600\"'\\", max_size=14), max_size=8).flatmap(
    lambda lines: st.sampled_from(["\n", "\r\n"]).map(lambda end: end.join(lines))
)


def check(text, found):
    """What holds of every aligned text."""
    assert revert(found.text, found.edits) == text
    assert apply(text, found.edits) == found.text
    assert found.misplaced <= found.misplaced_before


@settings(deadline=None, max_examples=60)
@given(TEXTS, st.sampled_from([2, 4, 8]), st.booleans(), st.integers(0, 9))
def test_any_text(bpe, text, stride, curve, offset):
    found = align_text(text, bpe, stride, CURVE if curve and stride == 8 else (), offset_tokens=offset)
    check(text, found)
    assert meaning(found.text, "text") == meaning(text, "text")
    assert found.straddling == found.misplaced == 0
    assert found.added_tokens == len(bpe.encode(found.text)) - len(bpe.encode(text))


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-99, 10**20), st.floats(allow_nan=False), st.text(max_size=6)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=4)),
    max_leaves=12,
)


@settings(deadline=None, max_examples=60)
@given(VALUES, st.sampled_from([None, 2, "\t"]), st.booleans())
def test_json_is_equal(bpe, value, indent, ascii_only):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    found = align_text(text, bpe, 8, STRONG_START, form="json")
    check(text, found)
    assert json.loads(found.text) == value
    assert found.misplaced == 0


PIECES = [
    "x = 1", "def f(a,\n      b=2):\n    '''Doc\n\n    more'''\n    return (a +\n\n            b)", "# a note", "",
    "s = '''one\n  two   \n\n three'''", "t = 'a' \\\n    'b'",
    "if x:\n    y = {\n        'k': [1,\n 2],  # note\n    }",
    "z = f'''{x}\n{x!r}\n'''", "class A:\n\n    b: int = 3", "u = 'é漢'  ",
]  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from(PIECES), max_size=8), st.sampled_from(["\n", "\r\n"]), st.booleans(), st.booleans())
def test_code_parses_to_the_same_tree(bpe, pieces, end, last, shebang):
    text = "\n".join([*(["#!/usr/bin/python"] if shebang else []), *pieces]) + ("\n" if last else "")
    text = text.replace("\n", end)
    found = align_text(text, bpe, 8, CURVE, form="python")
    check(text, found)
    assert ast.dump(ast.parse(found.text)) == ast.dump(ast.parse(text))
    if shebang:
        assert found.text.startswith("#!/usr/bin/python" + (end if pieces or last else ""))


BLOCKS = ["# Title", "Words, and\nmore words.", "- a\n- b\n\n  c", "    code\n\n    more", "```\nx\n\n\ny\n```", "---",
          "<pre>\n\na\n\n</pre>", "> q", "| a | b |\n|---|---|\n| 1 | 2 |", "1. one\n2. two"]  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from(BLOCKS), max_size=8))
def test_pages_look_the_same(bpe, blocks):
    text = "\n\n".join(blocks) + "\n"
    found = align_text(text, bpe, 8, CURVE, form="markdown")
    check(text, found)
    assert meaning(found.text, "markdown") == meaning(text, "markdown")


@pytest.mark.parametrize(("form", "text"), [("python", CODE), ("markdown", PAGE), ("text", PAGE)])
def test_real_files(bpe, form, text):
    found = align_text(text, bpe, 8, CURVE, form=form)
    check(text, found)
    assert found.misplaced_before > 2  # there is something to do; how much, the page decides
    assert found.misplaced == 0
    assert found.straddling == 0
    assert found.added_tokens < 0.15 * found.tokens_before


def test_records_cost_little(bpe):
    records = [{"name": f"record {n * 7919}", "code": n, "note": "of sixteen tokens and more"} for n in range(200)]
    text = json.dumps(records)
    found = align_text(text, bpe, 8, CURVE, form="json")
    assert found.spans == 200
    assert found.misplaced == 0
    assert found.added_tokens < 0.05 * found.tokens_before


def test_marks(bpe):
    text = "The code of Ann is 42. The code of Bob is 77.\n" * 20
    found = align_text(text, bpe, 8, CURVE, mark=r"^The code of Ann is \d+")
    assert (found.spans, found.misplaced) == (20, 0)
    for wrong, says in (("(", "no regular expression"), ("Carl", "matches nothing")):
        with pytest.raises(IsophaseError, match=says):
            align_text(text, bpe, 8, mark=wrong)


def test_where_white_space_makes_no_tokens_visible_words_do(words_folder):
    words = LocatingTokenizer(str(words_folder))
    text = "the ? the\nthe the the ? the the\nthe ?\n" * 5
    silent = align_text(text, words, 4)
    assert silent.text == text
    assert silent.misplaced > 0
    found = align_text(text, words, 4, unit=" the")
    assert found.misplaced == 0
    assert revert(found.text, found.edits) == text


def test_formats_and_faults(bpe):
    names = {"a.py": "python", "A.JSON": "json", "b.md": "markdown", "c.jsonl": "text", "d": "text"}
    assert {name: format_of(name) for name in names} == names
    for form, text in (("python", "def"), ("json", "{"), ("yaml", "a: 1"), ("python", "x = 1\ry = 2")):
        with pytest.raises(IsophaseError):
            find(text, form)
    with pytest.raises(IsophaseError, match="offset"):
        align_text("x", bpe, 4, offset_tokens=-1)
    with pytest.raises(ValueError, match="there is no"):
        revert("abc", align_text("a\nb" * 20, bpe, 4).edits)
