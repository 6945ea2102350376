"""Measures by hand, intervals, advice on planted differences, and the command."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from isophase.cli.main import main
from isophase.errors import IsophaseError
from isophase.retrieval.compare.metrics import (
    Estimate,
    Place,
    Question,
    Units,
    best_places,
    estimate,
    evaluate,
    relevant,
)
from isophase.retrieval.compare.run import MethodResult, advise, read_questions
from isophase.retrieval.index.documents import Document

GAINS = 1 / np.log2(np.arange(2, 12))


def units(document, start, end, scores, grid=None) -> Units:
    """Chunks whose cosine with (1, 0) is `scores`."""
    values = np.array(scores, dtype=np.float32)
    return Units(
        document_N=np.array(document),
        start_N=np.array(start),
        end_N=np.array(end),
        grid_N=np.zeros(len(document), dtype=np.int64) if grid is None else np.array(grid),
        vectors_ND=np.stack([values, np.sqrt(1 - values**2)], axis=1),
    )


def ask(made: Units, *places: Place):
    return evaluate(made, [Question(text="?", places=places)], np.array([[1.0, 0.0]], dtype=np.float32))


def test_ndcg_and_recall_by_hand() -> None:
    # Ranking: document 1 [0, 10), document 0 [10, 20), document 0 [0, 10), document 1 [10, 20).
    made = units([0, 0, 1, 1], [0, 10, 0, 10], [10, 20, 10, 20], [0.5, 0.6, 0.7, 0.1])
    found = ask(made, Place(document=0, start_char=0, end_char=20))
    assert found.chunk_ndcg[0] == pytest.approx((GAINS[1] + GAINS[2]) / (GAINS[0] + GAINS[1]))
    assert found.chunk_recall[0] == 1
    assert found.document_ndcg[0] == pytest.approx(GAINS[1])
    assert found.document_recall[0] == 1
    assert found.first.tolist() == [[1, 0]]
    known_only = ask(made, Place(document=1))
    assert np.isnan(known_only.chunk_ndcg[0])
    assert known_only.document_ndcg[0] == 1


def test_what_is_relevant() -> None:
    made = units([0] * 4, [0, 10, 20, 30], [10, 20, 30, 40], [0.1] * 4)
    for start, end, expected in [
        (0, 10, [0]),
        (12, 15, [1]),  # within a chunk
        (5, 25, [0, 1, 2]),  # half of a chunk at either end
        (6, 24, [1]),  # less than half
        (8, 12, [0, 1]),  # half of the answer in each
        (19, 20, [1]),
    ]:
        assert np.flatnonzero(relevant(made, [Place(document=0, start_char=start, end_char=end)])).tolist() == expected
    assert not relevant(made, [Place(document=1, start_char=0, end_char=9)]).any()
    # A long answer in short chunks, none of which it fills by half: impossible; in long ones, the fullest counts.
    wide = units([0, 0], [0, 100], [100, 200], [0.1] * 2)
    assert relevant(wide, [Place(document=0, start_char=70, end_char=140)]).tolist() == [False, True]


def test_the_best_of_several_grids_wins_and_hides_what_it_overlaps() -> None:
    made = units([0, 0, 0, 0, 1], [0, 10, 0, 5, 0], [10, 20, 5, 15, 9], [0.5, 0.6, 0.1, 0.9, 0.3], [0, 0, 1, 1, 0])
    scores = made.vectors_ND[:, 0]
    assert best_places(made, scores, 10, True).tolist() == [3, 4, 2]
    assert best_places(made, scores, 10, False).tolist() == [3, 1, 0, 4, 2]
    # One grid has two relevant chunks; the found one that covers half of each is one of two.
    found = ask(made, Place(document=0, start_char=0, end_char=20))
    assert found.chunk_recall[0] == 1
    assert found.chunk_ndcg[0] == pytest.approx((GAINS[0] + GAINS[2]) / (GAINS[0] + GAINS[1]))


def test_intervals() -> None:
    rng = np.random.default_rng(1)
    covered = []
    for n in range(60):
        made = estimate(rng.normal(0.3, 1.0, 80), seed=n, resamples=999)
        assert made is not None
        assert made.low < made.mean < made.high
        covered.append(made.low <= 0.3 <= made.high)
    assert 0.85 <= np.mean(covered) <= 1
    assert estimate(np.array([np.nan, 1.0])) == Estimate(mean=1, low=1, high=1)
    assert estimate(np.array([np.nan])) is None
    assert estimate(np.arange(9.0)) == estimate(np.arange(9.0))


def method(name: str, low: float | None, high: float = 0.0, readings: int = 1) -> MethodResult:
    one = Estimate(mean=0.5, low=0.4, high=0.6)
    difference = None if low is None else Estimate(mean=(low + high) / 2, low=low, high=high)
    return MethodResult(
        method=name, vectors=9, readings=readings, chunk_ndcg=one, chunk_recall=one, document_ndcg=one,
        document_recall=one, difference=difference,
    )  # fmt: skip


def test_advice() -> None:
    naive = method("naive", None)
    nothing = advise([naive, method("late", -0.1, 0.2), method("blended", -0.3, -0.1)])
    assert nothing.startswith("Use naive vectors: nothing is surely above")
    assert nothing.endswith("Surely below naive: blended.")
    better = advise([naive, method("late", 0.01, 0.03), method("blended", 0.02, 0.1, readings=2)])
    assert better.startswith("Use blended: +0.060 (+0.020 to +0.100")
    assert "2 readings of every document" in better


def document(path: str, text: str) -> Document:
    return Document(path=path, digest="", size_bytes=0, text=text, skipped="")


def test_questions_of_a_file(tmp_path: Path) -> None:
    documents = [document("a/one.txt", "All about cats. They purr."), document("b/one.txt", "Dogs bark.")]
    lines = [
        {"query": "purr?", "document": "a/one.txt", "answer": "They purr."},
        {"query": "purr?", "document": "b/one.txt"},
        {"query": "bark?", "document": "b/one.txt", "answer": "Dogs"},
    ]
    path = tmp_path / "queries.jsonl"
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    assert read_questions(path, documents) == [
        Question(text="purr?", places=(Place(document=0, start_char=16, end_char=26), Place(document=1))),
        Question(text="bark?", places=(Place(document=1, start_char=0, end_char=4),)),
    ]
    for line, words in [
        ({"query": "x", "document": "one.txt"}, "2 documents among DOCS"),
        ({"query": "x", "document": "c.txt"}, "no document among DOCS"),
        ({"query": "x", "document": "b/one.txt", "answer": "cats"}, "the answer 'cats' does not stand in"),
        ({"query": "x"}, "document: Field required"),
        ({"query": "x", "document": "b/one.txt", "reply": "y"}, "reply: Extra inputs"),
        ("x", "line 4 of"),
        ({"query": "x", "document": "b/one.txt", "answer": ""}, "does not stand in"),
    ]:
        path.write_text("\n".join(map(json.dumps, [*lines, line])))
        with pytest.raises(IsophaseError, match=words):
            read_questions(path, documents)
    path.write_text(json.dumps(lines[0]))
    with pytest.raises(IsophaseError, match="has 1 questions"):
        read_questions(path, documents)


def test_the_command(model_folder: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    topics = ["cats purr and sleep", "dogs bark at night", "the chunk starts here", "tokens are not lost"]
    for n, topic in enumerate(topics):
        (tmp_path / "docs" / f"{n}.txt").write_text(f"{topic}. " * 5 + f"In short: {topic}!")
    (tmp_path / "docs" / "empty.txt").write_text("")
    lines = [{"query": t, "document": f"{n}.txt", "answer": f"In short: {t}!"} for n, t in enumerate(topics)]
    (tmp_path / "queries.jsonl").write_text("\n".join(map(json.dumps, lines)))

    def call(*arguments: object) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["isophase", "embed", "compare", "docs", *map(str, arguments)])
        main_code = 0
        try:
            main()
        except SystemExit as end:
            main_code = int(end.code or 0)
        assert main_code == 0
        return capsys.readouterr()

    common = ("--model", model_folder, "--queries", "queries.jsonl", "--rule", "fixed(8)", "--rule", "sentences")
    out, err = call(*common, "--json", "result.json")
    assert "skipped 'docs/empty.txt': is empty" in err
    result = json.loads((tmp_path / "result.json").read_text())
    fixed, sentences = result["rules"]
    names = ["naive", "late", "blended", "whole"]
    assert [m["method"] for m in fixed["methods"]] == [*names, "late, 4 grids", "blended, 4 grids"]
    assert [m["method"] for m in sentences["methods"]] == names
    assert fixed["documents"] == fixed["questions"] == 4
    assert fixed["measure"] == "chunk_ndcg"
    assert fixed["methods"][3]["vectors"] == 4
    assert fixed["methods"][3]["difference"] is fixed["methods"][3]["chunk_ndcg"] is None
    assert fixed["methods"][4]["vectors"] > 3 * fixed["methods"][1]["vectors"]
    for part in result["rules"]:
        assert f"{part['rule']}: {part['advice']}" in out
    again, _ = call(*common, "--json", "-")
    assert json.loads(again) == result
