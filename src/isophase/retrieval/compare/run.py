"""Which vectors find answers best in one's own documents: naive, late, blended, whole, several grids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from isophase.chunking import FixedStride
from isophase.errors import IsophaseError
from isophase.retrieval.compare.metrics import Estimate, Found, Place, Question, estimate, evaluate
from isophase.retrieval.compare.reading import read_all
from isophase.retrieval.index.documents import Document
from isophase.retrieval.late.chunker import LateChunker
from isophase.retrieval.late.rules import parse_rule
from isophase.retrieval.late.spans import shifted

_CONFIDENCE = 0.95


class QuestionLine(BaseModel):
    """One line of a queries file.

    Attributes:
        query: the question.
        document: path of the document that answers it, or the end of one that only it has.
        answer: text of the answer as it stands in the document; None where only the document is known.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    query: str
    document: str
    answer: str | None = None


class MethodResult(BaseModel):
    """How one kind of vectors did; measures are means over questions with 95 % intervals.

    Attributes:
        method: `naive`, `late`, `blended`, `whole`, `late, 4 grids` or `blended, 4 grids`.
        vectors: rows of its index.
        readings: times that every document is read to make it.
        chunk_ndcg: nDCG@10 of chunks; None where it has no chunks, or no question names an answer's text.
        chunk_recall: share of relevant chunks among the first 10.
        document_ndcg: nDCG@10 of documents, ranked by their best chunk.
        document_recall: share of relevant documents among the first 10.
        difference: of the deciding measure to naive vectors, by question; its interval holds for all methods together.
    """

    model_config = ConfigDict(frozen=True)

    method: str
    vectors: int
    readings: int
    chunk_ndcg: Estimate | None
    chunk_recall: Estimate | None
    document_ndcg: Estimate
    document_recall: Estimate
    difference: Estimate | None


class Comparison(BaseModel):
    """A comparison on one rule.

    Attributes:
        rule: as written.
        questions: number of questions.
        documents: number of documents.
        measure: that decides: `chunk_ndcg`, or `document_ndcg` where no question names an answer's text.
        methods: results.
        advice: which to use, and why.
    """

    model_config = ConfigDict(frozen=True)

    rule: str
    questions: int
    documents: int
    measure: str
    methods: tuple[MethodResult, ...]
    advice: str


class Comparisons(BaseModel):
    """Comparisons of several rules on the same questions."""

    model_config = ConfigDict(frozen=True)

    rules: tuple[Comparison, ...]


def compare_rules(
    chunker: LateChunker,
    documents: Sequence[Document],
    questions: Sequence[Question],
    rules: Sequence[str],
    *,
    late_weight: float = 0.5,
    offsets: int = 4,
    say: Callable[[str, int], None] | None = None,
) -> Comparisons:
    """`compare` for each rule; `say` is called with the rule and the number of documents read."""
    for rule in rules:
        parse_rule(rule)  # before anything is read
    parts = [
        compare(
            chunker, documents, questions, rule, late_weight=late_weight, offsets=offsets,
            say=None if say is None else partial(say, rule),
        )
        for rule in dict.fromkeys(rules)
    ]  # fmt: skip
    return Comparisons(rules=tuple(parts))


def compare(
    chunker: LateChunker,
    documents: Sequence[Document],
    questions: Sequence[Question],
    rule: str,
    *,
    late_weight: float = 0.5,
    offsets: int = 4,
    say: Callable[[int], None] | None = None,
) -> Comparison:
    """Rank the chunks of one rule by each kind of vectors.

    Args:
        chunker: its encoder and overlap count.
        documents: read ones; numbers of the questions' places refer to them.
        questions: at least two.
        rule: as written.
        late_weight: of blended vectors.
        offsets: grids of a fixed stride that are tried together; rules that follow the content have one.
        say: called with the number of documents read.
    """
    made = parse_rule(rule)
    grids = shifted(made, min(offsets, made.stride_tokens)) if isinstance(made, FixedStride) else [made]
    reading = read_all(chunker, [d.text for d in documents], [*grids, None], [*[True] * len(grids), False], say)
    vectors = chunker.encode_queries([q.text for q in questions])
    every, last = list(range(len(grids))), len(grids)
    plans: dict[str, tuple[list[int], float, int]] = {
        "naive": ([0], 0.0, 1),
        "late": ([0], 1.0, 1),
        "blended": ([0], late_weight, 2),
        "whole": ([last], 1.0, 1),
    }
    if len(grids) > 1:
        plans[f"late, {len(grids)} grids"] = (every, 1.0, 1)
        plans[f"blended, {len(grids)} grids"] = (every, late_weight, 1 + len(grids))
    found: dict[str, tuple[Found, int]] = {}
    for name, (chosen, weight, _) in plans.items():
        units = reading.units(chosen, weight)
        found[name] = evaluate(units, questions, vectors), len(units.document_N)
    placed = any(place.start_char is not None for q in questions for place in q.places)
    measure = "chunk_ndcg" if placed else "document_ndcg"
    # Whole documents have no chunks to compare.
    rivals = [name for name in plans if name != "naive" and not (placed and name == "whole")]
    confidence = 1 - (1 - _CONFIDENCE) / len(rivals)
    naive = getattr(found["naive"][0], measure)
    methods = []
    for name, (_, _, readings) in plans.items():
        result, rows = found[name]
        chunks = name != "whole"
        document_ndcg, document_recall = estimate(result.document_ndcg), estimate(result.document_recall)
        assert document_ndcg is not None
        assert document_recall is not None
        difference = estimate(getattr(result, measure) - naive, confidence=confidence) if name in rivals else None
        methods.append(
            MethodResult(
                method=name,
                vectors=rows,
                readings=readings,
                chunk_ndcg=estimate(result.chunk_ndcg) if chunks else None,
                chunk_recall=estimate(result.chunk_recall) if chunks else None,
                document_ndcg=document_ndcg,
                document_recall=document_recall,
                difference=difference,
            )
        )
    return Comparison(
        rule=rule,
        questions=len(questions),
        documents=len(documents),
        measure=measure,
        methods=tuple(methods),
        advice=advise(methods),
    )


def advise(methods: Sequence[MethodResult]) -> str:
    """Which vectors to use: the best of those surely above naive ones, else naive ones, which cost least."""
    better = [m for m in methods if m.difference is not None and m.difference.low > 0]
    worse = [m.method for m in methods if m.difference is not None and m.difference.high < 0]
    tail = f" Surely below naive: {'; '.join(worse)}." if worse else ""
    if not better:
        return f"Use naive vectors: nothing is surely above them on these questions.{tail}"
    best = max(better, key=lambda m: m.difference.mean if m.difference else 0.0)
    assert best.difference is not None
    d = best.difference
    cost = f", at {best.readings} readings of every document" if best.readings > 1 else ", at the same cost"
    return (
        f"Use {best.method}: {d.mean:+.3f} ({d.low:+.3f} to {d.high:+.3f}, all methods together at 95 %) against "
        f"naive{cost}.{tail}"
    )


def read_questions(path: Path, documents: Sequence[Document]) -> list[Question]:
    """Questions of a file, one JSON object a line: `{"query": ..., "document": ..., "answer": ...}`.

    Lines with the same query are one question with several answers.

    Raises:
        IsophaseError: for a line that cannot be read, a document that is unknown or not unique, or an answer that does
            not stand in its document.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise IsophaseError(
            f"cannot read the queries {str(path)!r} ({type(error).__name__}).", "Give a file of JSON lines in UTF-8."
        ) from error
    places: dict[str, list[Place]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"line {number} of {str(path)!r}"
        try:
            asked = QuestionLine.model_validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"])) or "the line"
            raise IsophaseError(
                f"{where}: {name}: {first['msg']}.", 'Write {"query": "...", "document": "...", "answer": "..."}.'
            ) from error
        places.setdefault(asked.query, []).append(_place(asked, documents, where))
    if len(places) < 2:
        raise IsophaseError(f"{str(path)!r} has {len(places)} questions; a comparison needs 2 or more.", "Add some.")
    return [Question(text=query, places=tuple(found)) for query, found in places.items()]


def _place(asked: QuestionLine, documents: Sequence[Document], where: str) -> Place:
    exact = [n for n, d in enumerate(documents) if d.path == asked.document]
    tails = exact or [n for n, d in enumerate(documents) if f"/{d.path}".endswith(f"/{asked.document}")]
    if len(tails) != 1:
        what = "no document" if not tails else f"{len(tails)} documents"
        raise IsophaseError(
            f"{where} names {asked.document!r}, which {what} among DOCS has as its path.", "Correct it."
        )
    document = documents[tails[0]]
    if asked.answer is None:
        return Place(document=tails[0])
    start = document.text.find(asked.answer)
    if start < 0 or not asked.answer:
        raise IsophaseError(
            f"{where}: the answer {asked.answer[:40]!r} does not stand in {document.path!r}.",
            "Copy it from the document, or leave `answer` out.",
        )
    return Place(document=tails[0], start_char=start, end_char=start + len(asked.answer))
