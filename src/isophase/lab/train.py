"""Train one model from a recipe: `isophase train recipes/w8s8.yaml --out models/w8s8`."""

from __future__ import annotations

import json
import time
from hashlib import sha256
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from transformers import PreTrainedTokenizerFast

from isophase import __version__
from isophase.atomic import write_atomically
from isophase.errors import IsophaseError
from isophase.lab.recipe import Recipe
from isophase.lab.tasks import IGNORED, lookup_batch
from isophase.models.bundled import TrainingRecord
from isophase.models.config import CompressedQwen3Config
from isophase.models.qwen3 import CompressedQwen3ForCausalLM
from isophase.probes.pairs import END_ID, PAD_ID, WORDS

_CURVE_EVERY = 20


def train(recipe: Recipe, out: Path, command: str, console: Console | None = None) -> TrainingRecord:
    """Train the recipe's model and save it with its curve and record.

    Args:
        recipe: what to train.
        out: folder for `config.json`, `model.safetensors`, the tokenizer, `curve.jsonl`,
            `recipe.json` and `training.json` (written last).
        command: how the user called this, for the record.
        console: where progress goes; None: nowhere.

    Returns:
        The record, as in `training.json`.

    Raises:
        IsophaseError: for impossible model settings or a folder that holds another finished run.
    """
    if (out / "training.json").exists():
        raise IsophaseError(f"{str(out)!r} already holds a trained model.", "Choose another --out, or remove it.")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise IsophaseError(f"cannot write to {str(out)!r}: {error.strerror}.", "Choose another --out.") from error
    torch.set_num_threads(recipe.threads)
    model = build_model(recipe)
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=0.0, betas=recipe.optimiser.betas, weight_decay=recipe.optimiser.weight_decay
    )
    rng = np.random.default_rng(recipe.seed)
    curve: list[dict[str, Any]] = []
    recent: list[tuple[float, float]] = []
    began = time.monotonic()
    step = tokens = sequences = 0
    with _progress(console) as progress:
        bar = progress.add_task("training", total=recipe.steps, note="")
        for number, stage in enumerate(recipe.stages):
            for _ in range(stage.steps):
                batch = lookup_batch(stage, rng)
                rate = recipe.optimiser.rate(step, recipe.steps)
                for group in optimiser.param_groups:
                    group["lr"] = rate
                recent.append(train_step(model, optimiser, batch.ids, batch.labels, recipe.optimiser.clip_norm))
                step += 1
                sequences += stage.batch
                tokens += batch.ids.size
                if step % _CURVE_EVERY == 0 or step == recipe.steps:
                    loss, accuracy = (float(v) for v in np.mean(recent, axis=0))
                    recent.clear()
                    curve.append(
                        {
                            "step": step,
                            "stage": number,
                            "loss": round(loss, 5),
                            "accuracy": round(accuracy, 5),
                        }
                    )
                    speed = tokens / (time.monotonic() - began)
                    note = f"loss {loss:.3f}  accuracy {accuracy:.3f}  {speed:,.0f} tokens/s"
                    progress.update(bar, completed=step, note=note)
    seconds = time.monotonic() - began

    model.eval().save_pretrained(out)
    pairs_tokenizer().save_pretrained(out)
    write_atomically(out / "curve.jsonl", "".join(json.dumps(point) + "\n" for point in curve))
    write_atomically(out / "recipe.json", recipe.model_dump_json(indent=2) + "\n")
    record = TrainingRecord(
        name=recipe.name,
        purpose=recipe.purpose,
        parameters=sum(p.numel() for p in model.parameters()),
        weights_bytes=(out / "model.safetensors").stat().st_size,
        window_tokens=model.config.compression_window,
        stride_tokens=model.config.compression_stride,
        kv_heads=model.config.num_key_value_heads,
        layers=model.config.num_hidden_layers,
        hidden_size=model.config.hidden_size,
        seed=recipe.seed,
        steps=recipe.steps,
        sequences=sequences,
        tokens=tokens,
        seconds=round(seconds, 1),
        threads=recipe.threads,
        final_loss=curve[-1]["loss"],
        final_accuracy=curve[-1]["accuracy"],
        versions={
            "isophase": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        command=command,
        probe=recipe.probe,
    )
    write_atomically(out / "training.json", record.model_dump_json(indent=2) + "\n")
    return record


def build_model(recipe: Recipe) -> CompressedQwen3ForCausalLM:
    """A freshly initialised model. Parameters of equal name and shape start equal in matched recipes.

    Raises:
        IsophaseError: for settings that the configuration refuses.
    """
    # transformers takes any keyword: a misspelt `compression_stride` would train full attention.
    if unknown := sorted(set(recipe.model) - set(CompressedQwen3Config().to_dict())):
        raise IsophaseError(
            f"recipe {recipe.name!r}: model: there is no setting {unknown[0]!r}.",
            "The settings are those of CompressedQwen3Config.",
        )
    try:
        config = CompressedQwen3Config(
            vocab_size=len(WORDS),
            pad_token_id=PAD_ID,
            eos_token_id=END_ID,
            bos_token_id=None,
            record_style="pairs",
            **recipe.model,
        )
        model = CompressedQwen3ForCausalLM(config)
    except (ValueError, TypeError, RuntimeError, StrictDataclassError) as error:
        raise IsophaseError(
            f"recipe {recipe.name!r}: model: {shorten(str(error), 300)}.",
            "Correct the recipe's `model` settings.",
        ) from error
    embeddings = model.get_input_embeddings().weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norm weights and gate biases are constants at the start.
            if parameter.dim() < 2 or name.endswith("gate_bias_WK"):
                continue
            seed = int.from_bytes(sha256(f"{recipe.seed} {name}".encode()).digest()[:8]) >> 1
            generator = torch.Generator().manual_seed(seed)
            wide = parameter is embeddings and config.embedding_range is not None
            std = config.embedding_range if wide else config.initializer_range
            parameter.normal_(0.0, std, generator=generator)
    return model


def train_step(
    model: CompressedQwen3ForCausalLM,
    optimiser: torch.optim.Optimizer,
    ids_BT: np.typing.NDArray[np.int64],
    labels_BT: np.typing.NDArray[np.int64],
    clip_norm: float,
) -> tuple[float, float]:
    """One optimiser step; returns loss and accuracy over the predicted tokens."""
    model.train()
    ids, labels = torch.from_numpy(ids_BT), torch.from_numpy(labels_BT)[:, 1:]
    predicted = labels != IGNORED
    # Only predicted positions go through the head: most of the sequence is context.
    hidden = model.model(ids, use_cache=False).last_hidden_state[:, :-1][predicted]
    logits = model.lm_head(hidden)
    loss = nn.functional.cross_entropy(logits, labels[predicted])
    optimiser.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimiser.step()
    accuracy = (logits.argmax(dim=-1) == labels[predicted]).float().mean()
    return float(loss.detach()), float(accuracy)


def pairs_tokenizer() -> PreTrainedTokenizerFast:
    """The word-level tokenizer of the bundled models."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>")


def _progress(console: Console | None) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}  {task.fields[note]}"),
        TimeRemainingColumn(),
        console=console or Console(quiet=True),
        disable=console is None,
        transient=True,
    )
