"""Language-model pretraining on local text, alone and mixed with lookup."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from isophase.errors import IsophaseError
from isophase.lab.train.recipe import Recipe
from isophase.lab.train.run import Cadence, pairs_tokenizer, train
from isophase.lab.train.tasks.stream import DataStream
from isophase.lab.train.tasks.text import Corpus, TextStage
from isophase.probes.pairs import WORDS

END = 1


@pytest.fixture
def text(tmp_path: Path) -> dict[str, object]:
    """A tokenizer folder and 40 documents in two formats, every word of the closed vocabulary in them."""
    pairs_tokenizer().save_pretrained(tmp_path / "tokenizer")
    rng = np.random.default_rng(0)
    documents = [" ".join(rng.choice(WORDS[3:], rng.integers(5, 60))) for _ in range(40)]
    (tmp_path / "a.txt").write_text(documents[0])
    lines = "".join(json.dumps({"text": document}) + "\n" for document in documents[1:])
    (tmp_path / "b.jsonl").write_text(lines)
    stage = {
        "kind": "text",
        "files": [str(tmp_path / "*.txt"), str(tmp_path / "b.jsonl")],
        "sequence_tokens": 16,
        "batch": 4,
        "steps": 8,
        "validation_sequences": 5,
    }
    return {"stage": stage, "tokenizer": str(tmp_path / "tokenizer"), "documents": documents}


def test_sequences_are_the_text(text, tmp_path: Path) -> None:
    stage, tokenizer = TextStage.model_validate(text["stage"]), pairs_tokenizer()
    corpus = Corpus(stage, tokenizer, tmp_path)
    stream = [i for document in text["documents"] for i in [*tokenizer(document)["input_ids"], END]]
    count = len(stream) // 16
    expected = {tuple(stream[16 * n : 16 * n + 16]) for n in range(count)}
    held_out = [tuple(row) for batch in corpus.validation(4) for row in batch.ids.tolist()]
    assert len(held_out) == 5
    trained = [tuple(row) for row in corpus.batch(0, count - 5, seed=3).ids.tolist()]
    assert {*held_out, *trained} == expected
    assert len({*held_out, *trained}) == len(held_out) + len(trained) == count
    # The next epoch has another order, another seed too, and how many are drawn at once does not matter.
    again = [tuple(row) for row in corpus.batch(count - 5, count - 5, seed=3).ids.tolist()]
    assert again != trained
    assert set(again) == set(trained)
    assert corpus.batch(0, 9, seed=4).ids.tolist() != corpus.batch(0, 9, seed=3).ids.tolist()
    assert corpus.batch(7, 1, seed=3).ids.tolist() == corpus.batch(0, 9, seed=3).ids[7:8].tolist()
    assert [list(row) for row in held_out] == [list(r) for b in corpus.validation(2) for r in b.ids.tolist()]


def test_a_run_on_text_and_lookup(text, make_recipe, tmp_path: Path) -> None:
    lookup = {"context_tokens": 16, "pairs": 3, "queries": 2, "batch": 3, "steps": 6}
    stages = [{"kind": "mixture", "parts": [text["stage"], lookup]}, {**text["stage"], "steps": 4}]
    changes = {
        "stages": stages,
        "tokenizer": text["tokenizer"],
        "curve_every_steps": 2,
        "validate_every_steps": 6,
    }
    recipes = {
        name: make_recipe(model=model, **changes)
        for name, model in (("full", {}), ("grid", {"compression_window": 4, "compression_stride": 4}))
    }
    records = {name: train(recipe, tmp_path / name, "") for name, recipe in recipes.items()}
    assert {record.tokens for record in records.values()} == {8 * 4 * 16 + 6 * 3 * 22 + 4 * 4 * 16}
    curves = [
        [json.loads(line) for line in (tmp_path / name / "curve.jsonl").read_text().splitlines()] for name in recipes
    ]
    assert [p["step"] for p in curves[0] if "validation_loss" in p] == [6, 12, 18]
    assert curves[0][-1]["validation_loss"] < curves[0][2]["validation_loss"] + 0.5
    assert Recipe.model_validate_json((tmp_path / "full" / "recipe.json").read_text()) == recipes["full"]
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "full").config
    assert (config.vocab_size, config.record_style, config.eos_token_id) == (len(WORDS), "pairs", END)
    assert len(list(tmp_path.glob("tokens-*.bin"))) == 1


def test_matched_runs_read_the_same(text, tmp_path: Path, make_recipe) -> None:
    lookup = {"context_tokens": 16, "pairs": 3, "queries": 2, "batch": 3, "steps": 6}
    stages = make_recipe(stages=[{"kind": "mixture", "parts": [text["stage"], lookup]}]).stages
    streams = [DataStream(stages, seed, pairs_tokenizer(), tmp_path) for seed in (5, 5, 6)]
    read = [[stream.draw(part).ids.tolist() for _, part in stream.schedule()] for stream in streams]
    assert read[0] == read[1] != read[2]
    # Stopped anywhere and restored, it goes on alike; the words of lookup keep their ids in this vocabulary.
    for stop in (0, 1, 7, 13):
        first, second = (DataStream(stages, 5, pairs_tokenizer(), tmp_path) for _ in range(2))
        head = [first.draw(part).ids.tolist() for _, (_, part) in zip(range(stop), first.schedule(), strict=False)]
        second.restore(first.state())
        assert head + [second.draw(part).ids.tolist() for _, part in second.schedule(stop)] == read[0]


def test_a_text_run_resumes(text, make_recipe, tmp_path: Path, monkeypatch) -> None:
    import isophase.lab.train.run as module

    recipe = make_recipe(stages=[text["stage"]], tokenizer=text["tokenizer"], curve_every_steps=2)
    train(recipe, tmp_path / "one", "")
    real, done = module.train_step, []

    def step(*arguments):
        if len(done) == 5:
            raise KeyboardInterrupt
        done.append(1)
        return real(*arguments)

    monkeypatch.setattr(module, "train_step", step)
    with pytest.raises(KeyboardInterrupt):
        train(recipe, tmp_path / "two", "", cadence=Cadence(steps=3))
    monkeypatch.undo()
    (tmp_path / "c.txt").write_text("a new file")
    with pytest.raises(IsophaseError, match="have changed since the run began"):
        train(recipe, tmp_path / "two", "", resume=True)
    (tmp_path / "c.txt").unlink()
    train(recipe, tmp_path / "two", "", resume=True)
    for name in ("curve.jsonl", "model.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"files": ["nowhere/*.txt"]}, "no text file matches 'nowhere"),
        ({"sequence_tokens": 100_000}, "nothing is left to train on"),
        ({"validation_sequences": 10_000}, "nothing is left to train on"),
    ],
)
def test_impossible_text_is_one_line(text, make_recipe, tmp_path: Path, changes, words) -> None:
    recipe = make_recipe(stages=[text["stage"] | changes], tokenizer=text["tokenizer"])
    with pytest.raises(IsophaseError, match=words):
        train(recipe, tmp_path / "m", "")


def test_impossible_tokenizers_are_one_line(text, make_recipe, tmp_path: Path) -> None:
    with pytest.raises(IsophaseError, match="needs a tokenizer"):
        train(make_recipe(stages=[text["stage"]]), tmp_path / "a", "")
    with pytest.raises(IsophaseError, match="cannot load the tokenizer"):
        train(make_recipe(stages=[text["stage"]], tokenizer=str(tmp_path / "none")), tmp_path / "b", "")
    with pytest.raises(IsophaseError, match="vocab_size=7 is less than"):
        train(
            make_recipe(stages=[text["stage"]], tokenizer=text["tokenizer"], model={"vocab_size": 7}),
            tmp_path / "c",
            "",
        )
    two = [text["stage"], {**text["stage"], "validation_sequences": 0}]
    with pytest.raises(IsophaseError, match="would train on what the other holds out"):
        train(make_recipe(stages=two, tokenizer=text["tokenizer"]), tmp_path / "d", "")
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    few = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<u>": 0, "?": 1}, "<u>")), unk_token="<u>"
    )
    few.save_pretrained(tmp_path / "few")
    with pytest.raises(IsophaseError, match="lookup needs one"):
        train(make_recipe(tokenizer=str(tmp_path / "few")), tmp_path / "e", "")
