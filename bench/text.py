"""Language modelling with every memory: is a memory that follows the content as good on text as the fixed grid?

    python bench/text.py                     some 40 minutes of one core
    python bench/text.py --steps 200 --memories full "fixed W8/S8" hash-overlap

The text is what every Python carries: the sources and docstrings of its own standard library. A byte-pair vocabulary
of 2,048 tokens is learned from it; matched models with the shape of the bundled ones train on the same sequences in the
same order, at one entry for every 8 tokens. Printed: the loss on held-out sequences, and its ratio to the fixed grid's
with a 95 % interval, paired over sequences (bootstrap). A run that is cut off goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import platform
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from isophase.lab.sweep.memory_use import memory_use
from isophase.lab.train.recipe import Recipe
from isophase.lab.train.run import train
from isophase.lab.train.tasks.stream import DataStream
from isophase.probes.prompt import Prompt

VOCABULARY, SEQUENCE, BATCH, HELD_OUT = 2048, 256, 16, 256
GRID = {"compression_window": 8, "compression_stride": 8, "local_window": 11}
CONTENT = {"chunk_rule": "local_maximum", "chunk_groups": 2, "chunk_radius": 4, "chunk_max_tokens": 14}
OVERLAP = {**CONTENT, "chunk_overlap": 2}
BASE = "fixed W8/S8"
MEMORIES: dict[str, dict[str, Any]] = {
    "full": {},
    BASE: GRID,
    "fixed W16/S8": {**GRID, "compression_window": 16},
    "staggered by heads": {**GRID, "grid_shift": "heads", "chunk_groups": 2},
    "hash-overlap": OVERLAP,
    "delimiters-overlap": {**OVERLAP, "chunk_score": "ranks"},
}


def make_tokenizer(files: list[Path], folder: Path) -> PreTrainedTokenizerFast:
    """Learn a byte-pair vocabulary, once."""
    if not (folder / "tokenizer.json").exists():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        special = ["<pad>", "<eos>"]
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        tokenizer.train(
            [str(file) for file in files],
            trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet),
        )
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
        fast.save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def delimiter_ranks(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """3 for line breaks, 2 for punctuation that ends something, 1 for tokens that begin a word, 0 for the rest."""
    ranks = []
    for number in range(len(tokenizer)):
        text = tokenizer.decode([number])
        ends = bool(text.strip()) and all(c in ".,;:!?)]}" for c in text.strip())
        ranks.append(3 if "\n" in text else 2 if ends else 1 if text.startswith(" ") else 0)
    return ranks


def make_recipe(name: str, files: list[Path], folder: Path, steps: int, seed: int, ranks: list[int]) -> Recipe:
    memory = dict(MEMORIES[name])
    if memory.get("chunk_score") == "ranks":
        memory["chunk_ranks"] = ranks
    model = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "local_window": 8,
        **memory,
    }
    stage = {
        "kind": "text",
        "files": [str(file) for file in files],
        "sequence_tokens": SEQUENCE,
        "batch": BATCH,
        "steps": steps,
        "validation_sequences": HELD_OUT,
    }
    return Recipe.model_validate(
        {
            "name": f"{name.lower().replace(' ', '-').replace('/', '-')}-seed{seed}",
            "seed": seed,
            "threads": 1,
            "device": "cpu",
            "model": model,
            "tokenizer": str(folder / "tokenizer"),
            "stages": [stage],
            "optimiser": {"learning_rate": 0.003, "final_share": 0.05},
        }
    )


def losses(model: Any, data: DataStream) -> np.ndarray:
    """Mean loss of every held-out sequence, nats a token."""
    found = []
    with torch.inference_mode():
        for batch in data.validation():
            ids = torch.from_numpy(batch.ids)
            log_p = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[:, :-1].float(), dim=-1)
            found.append(-log_p.gather(-1, ids[:, 1:, None])[..., 0].mean(dim=1))
    return torch.cat(found).numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[2])
    parser.add_argument("--memories", nargs="+", default=list(MEMORIES), choices=list(MEMORIES))
    parser.add_argument("--out", type=Path, default=Path("text-bench"))
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    tokenizer = make_tokenizer(files, chosen.out / "tokenizer")
    ranks = delimiter_ranks(tokenizer)
    console, rows = Console(stderr=True), []
    for seed in chosen.seeds:
        by_memory = {}
        for name in chosen.memories:
            recipe = make_recipe(name, files, chosen.out, chosen.steps, seed, ranks)
            folder = chosen.out / recipe.name
            record = train(recipe, folder, "python bench/text.py", console, resume=True)
            data = DataStream(recipe.stages, seed, tokenizer, chosen.out)
            model = AutoModelForCausalLM.from_pretrained(folder).eval()
            held_out = np.concatenate([batch.ids for batch in data.validation()])
            prompts = [
                Prompt(ids=ids.astype(np.int32), answer_ids=(0,), item=0, column=0, position_tokens=0, span_tokens=1)
                for ids in held_out[:48]
            ]
            by_memory[name] = (losses(model, data), memory_use(model.config, prompts), record)
        base = by_memory.get(BASE, next(iter(by_memory.values())))[0]
        rng = np.random.default_rng(0)
        draws = rng.integers(len(base), size=(4000, len(base)))
        for name, (loss, use, record) in by_memory.items():
            ratios = loss[draws].mean(axis=1) / base[draws].mean(axis=1)
            low, high = np.quantile(ratios, [0.025, 0.975])
            row = {
                "memory": name,
                "seed": seed,
                "loss": float(loss.mean()),
                "ratio": float(loss.mean() / base.mean()),
                "ratio_interval": [float(low), float(high)],
                "tokens_per_entry": use.tokens_per_entry,
                "exact_tokens": use.exact_tokens,
                "parameters": record.parameters,
                "tokens": record.tokens,
            }
            rows.append(row)
            entries = "none" if use.tokens_per_entry is None else f"{use.tokens_per_entry:.2f}"
            print(
                f"{name:20} seed {seed}: loss {row['loss']:.4f}, {row['ratio']:.4f} of {BASE} "
                f"({low:.4f} to {high:.4f}); "
                f"tokens per entry {entries} + {use.exact_tokens:.1f} exact, {record.parameters:,} parameters"
            )
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}; one "
        f"thread; {chosen.steps} steps of {BATCH} sequences of {SEQUENCE} tokens; {HELD_OUT} sequences held out; text: "
        f"{len(files)} files, vocabulary of {len(tokenizer):,}"
    )
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
