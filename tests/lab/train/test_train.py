"""A training run: its files, its reproducibility, and that matched models start and read alike."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from isophase.errors import IsophaseError
from isophase.lab.train.recipe import Recipe
from isophase.lab.train.run import build_model, pairs_tokenizer, train, train_step
from isophase.lab.train.tasks.lookup import IGNORED, lookup_batch
from isophase.models.bundled import TrainingRecord
from isophase.probes.pairs import ASK_ID, WORDS

FILES = {
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "curve.jsonl",
    "recipe.json",
    "training.json",
}
GRID = {"compression_window": 4, "compression_stride": 4}


def test_a_run_writes_all_its_files(make_recipe, tmp_path: Path) -> None:
    recipe = make_recipe(model=GRID)
    out = tmp_path / "deep" / "tiny"
    record = train(recipe, out, command="isophase train tiny.yaml")
    assert {p.name for p in out.iterdir()} >= FILES
    assert not list(out.glob("*.tmp"))
    assert TrainingRecord.model_validate_json((out / "training.json").read_text()) == record
    assert Recipe.model_validate_json((out / "recipe.json").read_text()) == recipe
    assert (record.steps, record.sequences) == (6, 3 * 4 + 3 * 2)
    assert record.tokens == 3 * 4 * (16 + 6) + 3 * 2 * (20 + 9)
    assert (record.window_tokens, record.stride_tokens, record.kv_heads, record.layers) == (4, 4, 1, 2)
    assert record.command == "isophase train tiny.yaml"
    assert record.probe == {"records": 4, "length_tokens": 32}
    curve = [json.loads(line) for line in (out / "curve.jsonl").read_text().splitlines()]
    assert [(point["step"], point["stage"]) for point in curve] == [(6, 1)]
    assert record.final_loss == curve[-1]["loss"]
    assert 0 <= record.final_accuracy <= 1
    weights = load_file(out / "model.safetensors")
    assert record.parameters == sum(t.numel() for t in weights.values())


def test_the_same_seed_gives_the_same_bytes(make_recipe, tmp_path: Path) -> None:
    runs = {}
    for name, seed in (("one", 5), ("two", 5), ("other", 6)):
        torch.manual_seed(len(runs))  # no global random state takes part
        np.random.seed(len(runs))  # noqa: NPY002
        train(make_recipe(model=GRID, seed=seed), tmp_path / name, command="")
        runs[name] = [(tmp_path / name / file).read_bytes() for file in ("model.safetensors", "curve.jsonl")]
    assert runs["one"] == runs["two"]
    assert runs["one"][0] != runs["other"][0]
    assert runs["one"][1] != runs["other"][1]


def test_the_loaded_model_is_the_trained_one(make_recipe, tmp_path: Path) -> None:
    recipe = make_recipe(model=GRID)
    train(recipe, tmp_path / "m", command="")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    # The same six steps, by hand.
    model = build_model(recipe)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
    rng, step = np.random.default_rng(recipe.seed), 0
    for stage in recipe.stages:
        for _ in range(stage.steps):
            batch = lookup_batch(stage, rng)
            optimiser.param_groups[0]["lr"] = recipe.optimiser.rate(step, 6)
            train_step(model, optimiser, batch.ids, batch.labels, 1.0)
            step += 1
    model.eval()
    ids = torch.from_numpy(lookup_batch(recipe.stages[0], np.random.default_rng(9)).ids)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert all(not torch.equal(p, before[name]) for name, p in loaded.named_parameters())


def test_a_step_learns_what_the_labels_say_and_no_more(make_recipe) -> None:
    recipe = make_recipe()
    model = build_model(recipe)
    batch = lookup_batch(recipe.stages[0], np.random.default_rng(0))
    labels = torch.from_numpy(batch.labels)
    with torch.no_grad():
        logits = model(torch.from_numpy(batch.ids)).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
    predicted = labels[:, 1:] != IGNORED
    right = (logits.argmax(-1) == labels[:, 1:])[predicted].float().mean()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.0)
    loss, accuracy = train_step(model, optimiser, batch.ids, batch.labels, 1.0)
    assert loss == pytest.approx(float(expected), rel=1e-5)
    assert accuracy == pytest.approx(float(right))
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    assert float(norm) <= 1.0 + 1e-4


def test_loss_falls(make_recipe) -> None:
    recipe = make_recipe(model=GRID)
    model = build_model(recipe)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
    batch = lookup_batch(recipe.stages[0], np.random.default_rng(0))
    losses = [train_step(model, optimiser, batch.ids, batch.labels, 1.0)[0] for _ in range(60)]
    assert losses[-1] < 0.3 * losses[0]


def test_matched_models_start_equal_where_they_are_equal(make_recipe) -> None:
    full, compressed = build_model(make_recipe()), build_model(make_recipe(model=GRID))
    wider = build_model(make_recipe(model={"compression_window": 8, "compression_stride": 4}))
    others = dict(compressed.named_parameters())
    assert set(dict(full.named_parameters())) < set(others)
    for name, parameter in full.named_parameters():
        assert torch.equal(parameter, others[name]), name
    # Another seed, and another name, start differently.
    assert not torch.equal(build_model(make_recipe(seed=6)).lm_head.weight, full.lm_head.weight)
    layers = full.model.layers
    assert not torch.equal(layers[0].mlp.up_proj.weight, layers[1].mlp.up_proj.weight)
    assert not torch.equal(layers[0].mlp.up_proj.weight, layers[0].mlp.gate_proj.weight)
    for branch in (
        wider.model.layers[0].self_attn.compressor.keys,
        compressed.model.layers[1].self_attn.compressor.values,
    ):
        assert float(branch.payload_WDC.detach().std()) == pytest.approx(0.12, rel=0.2)
        assert not branch.gate_bias_WK.any()
    assert float(full.get_input_embeddings().weight.detach().std()) == pytest.approx(1.0, rel=0.1)


def test_a_finished_folder_is_refused(make_recipe, tmp_path: Path) -> None:
    train(make_recipe(), tmp_path / "m", command="")
    before = {p.name: p.read_bytes() for p in (tmp_path / "m").iterdir()}
    with pytest.raises(IsophaseError, match="already holds a trained model"):
        train(make_recipe(seed=6), tmp_path / "m", command="")
    assert {p.name: p.read_bytes() for p in (tmp_path / "m").iterdir()} == before
    # One that was killed before its record was written is trained again, if so asked.
    (tmp_path / "m" / "training.json").unlink()
    with pytest.raises(IsophaseError, match="--resume"):
        train(make_recipe(), tmp_path / "m", command="")
    train(make_recipe(), tmp_path / "m", command="", resume=True)
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == before["model.safetensors"]


def test_a_folder_that_cannot_be_made(make_recipe, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(IsophaseError, match="cannot write to"):
            train(make_recipe(), out, command="")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"compression_window": 4, "compression_stride": 8}, ["stride 8", "window 4"]),
        ({"compression_window": 4}, ["give both"]),
        ({"compression_strid": 4}, ["no setting 'compression_strid'"]),
        ({"hidden_size": "wide"}, ["hidden_size", "wide"]),
        ({"vocab_size": 3}, ["vocab_size"]),
        ({"num_attention_heads": -1}, ["model"]),
    ],
)
def test_impossible_models_are_one_line(make_recipe, tmp_path: Path, model, words) -> None:
    with pytest.raises(IsophaseError) as caught:
        train(make_recipe(model=model), tmp_path / "m", command="")
    message = str(caught.value)
    assert "\n" not in message
    assert "'tiny'" in message
    assert all(word in message for word in words), message


def test_the_tokenizer_is_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = pairs_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    for one in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert len(one) == len(WORDS)
        assert one(" ".join(WORDS))["input_ids"] == list(range(len(WORDS)))
        assert one("?")["input_ids"] == [ASK_ID]
        assert (one.pad_token_id, one.eos_token_id) == (0, 1)
        assert one("gutters xqjvz")["input_ids"] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "w8s8", "w4s4", "hash4", "keys8"])
def test_the_bundled_curves_come_again(name: str, tmp_path: Path, monkeypatch) -> None:
    """The first forty steps of the bundled models: a change of the trainer must not change what it trains."""
    import isophase.lab.train.run as module
    from isophase.lab.train.recipe import read_recipe
    from isophase.models.bundled import bundled_folder

    real, done = module.train_step, []

    def step(*arguments):
        if len(done) == 40:
            raise KeyboardInterrupt
        done.append(1)
        return real(*arguments)

    monkeypatch.setattr(module, "train_step", step)
    recipe = read_recipe(Path(__file__).parents[3] / "recipes" / f"{name}.yaml")
    with pytest.raises(KeyboardInterrupt):
        train(recipe, tmp_path / "m", "")
    now, then = (
        [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()[:2]]
        for folder in (tmp_path / "m", bundled_folder(name))
    )
    # Another processor may round otherwise.
    assert [p["loss"] for p in now] == pytest.approx([p["loss"] for p in then], rel=1e-4)
