"""Every comparison of memories on one device, in under eight minutes on a CUDA device.

    python bench/gpu.py                                    writes gpu.json
    python bench/gpu.py --device cpu --minutes 2 --tiny    the same on a CPU, small

1. Executors: logits and gradients of dense masks (sdpa, eager), FlexAttention, packed and padded windows, in float32
   and bfloat16, for every memory; compiled on CUDA.
2. Speed: training and decoding against full attention and the fixed grid, and bytes of the cache (as `memory.py`).
3. The cure: matched runs of recipes/sweeps/cure-8.yaml, trained and audited in both of the paper's sweeps, as many
   as the time allows.
4. Text: held-out loss of the fixed grid and of chunks by content (as `text.py`).

Parts stop when their share of the time is spent, and say so.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

import memory
import text
from isophase.audit.analyse import build_report
from isophase.audit.run import plan_for, run_plan
from isophase.audit.settings import AuditSettings
from isophase.lab.sweep.grid import Run, read_sweep
from isophase.lab.train.recipe import Recipe
from isophase.lab.train.run import train
from isophase.lab.train.tasks.stream import DataStream
from isophase.models.config import CompressedQwen3Config
from isophase.models.qwen3 import CompressedQwen3ForCausalLM
from isophase.targets.huggingface import HuggingFaceTarget

CURE = Path(__file__).parents[1] / "recipes" / "sweeps" / "cure-8.yaml"
RUNS = ("fixed-seed2", "hash-overlap-seed2", "fixed-overlap-seed2", "staggered-seed2", "full-seed2")
# Largest difference, as a share of the largest number, that still is rounding.
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 6e-2}
SHARES = {"speed": 0.35, "cure": 0.4, "text": 0.15}


class Clock:
    """What is left of the time, by part."""

    def __init__(self, minutes: float) -> None:
        self.began, self.seconds = time.monotonic(), 60 * minutes

    def until(self, share: float) -> float:
        """When a part that may take this share of the whole has to stop."""
        return min(time.monotonic() + share * self.seconds, self.began + self.seconds)


def executors(device: str, length: int) -> list[dict[str, Any]]:
    """Logits and the gradient of every parameter, by executor, against padded windows under a dense mask."""
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for name in memory.MEMORIES:
            torch.manual_seed(0)
            config = CompressedQwen3Config(
                **{**memory.SHAPE, **memory.MEMORIES[name], "max_position_embeddings": length}
            )
            model = CompressedQwen3ForCausalLM(config).to(device, dtype)
            ids = torch.randint(0, config.vocab_size, (2, length), generator=torch.Generator().manual_seed(1)).to(
                device
            )
            reference = None
            # FlexAttention has no backward pass on a CPU.
            ways = [("sdpa", False, True), ("sdpa", True, True), ("eager", False, True)]
            ways.append(("flex_attention", True, device == "cuda"))
            for attention, packed, backward in ways:
                found = _execute(model, ids, attention, packed=packed, backward=backward)
                reference = reference or found
                differences = [_apart(a, b) for a, b in zip(found, reference, strict=False)]
                row = {
                    "memory": name,
                    "dtype": str(dtype).removeprefix("torch."),
                    "attention": attention,
                    "packed": packed,
                    "backward": backward,
                    "largest_difference": max(differences),
                    "equal": max(differences) <= ROUNDING[dtype],
                }
                rows.append(row)
    wrong = [row for row in rows if not row["equal"]]
    print(f"executors: {len(rows)} ways, {len(rows) - len(wrong)} equal to the reference")
    for row in wrong:
        print(f"  differs: {json.dumps(row)}")
    return rows


def _execute(model: Any, ids: torch.Tensor, attention: str, *, packed: bool, backward: bool) -> list[torch.Tensor]:
    model.set_attn_implementation(attention)
    for layer in model.model.layers:
        if layer.self_attn.compressor is not None:
            layer.self_attn.compressor.packed = packed
    model.zero_grad(set_to_none=True)
    # Compiling FlexAttention takes a C++ compiler and half a minute on a CPU; the masks are the same without.
    stance = "default" if ids.device.type == "cuda" else "force_eager"
    with torch.set_grad_enabled(backward), torch.compiler.set_stance(stance):
        logits = model(input_ids=ids, use_cache=False).logits
    if not backward:
        return [logits.float()]
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()).backward()
    return [logits.detach().float(), *(p.grad.float() for p in model.parameters())]


def _apart(found: torch.Tensor, reference: torch.Tensor) -> float:
    return float((found - reference).abs().max() / reference.abs().max().clamp(min=1e-6))


def speed(device: str, lengths: list[int], rounds: int, stop: float) -> list[dict[str, Any]]:
    """As memory.py, in bfloat16 on CUDA, under both kinds of attention."""
    rows = []
    kinds = ("flex_attention", "sdpa") if device == "cuda" else ("sdpa",)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for length in lengths:
        for attention in kinds:
            if time.monotonic() > stop:
                print(f"speed: no time left for {length:,} tokens with {attention}")
                continue
            machine = memory.Machine(device=device, dtype=dtype, attention=attention)
            trained = memory.training(machine, length, rounds) if length <= 4096 else None
            decoded, held = memory.decoding(machine, length, rounds)
            for name in memory.MEMORIES:
                row: dict[str, Any] = {"tokens": length, "memory": name, "attention": attention}
                for what, seconds in (("training", trained), ("decoding", decoded)):
                    if seconds is not None:
                        row[f"{what}, of full"] = memory.ratio(seconds[name], seconds["full"])
                        row[f"{what}, of fixed W8/S8"] = memory.ratio(seconds[name], seconds["fixed W8/S8"])
                row["bytes, of fixed W8/S8"] = round(held[name] / held["fixed W8/S8"], 3)
                rows.append(row)
                print(json.dumps(row), flush=True)
    return rows


def cure(device: str, folder: Path, *, tiny: bool, stop: float) -> list[dict[str, Any]]:
    """Train and audit matched runs while there is time."""
    rows = []
    runs = {run.name: run for run in read_sweep(CURE).runs}
    for name in RUNS:
        if time.monotonic() > stop:
            print(f"cure: no time left for {name}")
            continue
        recipe = _on(runs[name], device, tiny=tiny)
        record = train(recipe, folder / name, "python bench/gpu.py")
        target = HuggingFaceTarget(str(folder / name), name=f"hf:{name}", device=device)
        for probe, length in (("records", 114), ("prefix", 130)):
            settings = AuditSettings.model_validate(
                {
                    "targets": (target.name,),
                    "probes": (probe,),
                    "stride": "scan",
                    **recipe.probe,
                    "items": 2 if tiny else 48,
                    "length_tokens": length,
                }
            )
            run = folder / f"{name}-{probe}"
            plan = plan_for(settings, run, lambda _, target=target: target)
            run_plan(plan, run, lambda _, target=target: target)
            found = build_report(run, lambda _, target=target: target.tokenizer)
            row = {
                "run": name,
                "probe": probe,
                "mean": found.accuracy,
                "worst": min(value for value in found.accuracy_by_phase if value is not None),
                "gap_points": found.gap_points,
                "gap_interval_points": found.gap_interval_points,
                "period_tokens": found.period_tokens,
                "training_seconds": record.seconds,
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def _on(run: Run, device: str, *, tiny: bool) -> Recipe:
    change: dict[str, Any] = {"device": "auto" if device == "cuda" else "cpu", "precision": "fp32"}
    if tiny:
        change["stages"] = tuple(stage.model_copy(update={"steps": 2}) for stage in run.recipe.stages)
    return run.recipe.model_copy(update=change)


def language(device: str, folder: Path, *, tiny: bool, stop: float) -> list[dict[str, Any]]:
    """Held-out loss on text."""
    files = sorted(Path(text.sysconfig.get_path("stdlib")).glob("*.py"))[: 3 if tiny else None]
    tokenizer = text.make_tokenizer(files, folder / "tokenizer")
    rows = []
    for name in (text.BASE, "hash-overlap"):
        if time.monotonic() > stop:
            print(f"text: no time left for {name}")
            continue
        recipe = text.make_recipe(name, files, folder, 4 if tiny else 600, 2, [])
        recipe = recipe.model_copy(update={"device": "auto" if device == "cuda" else "cpu"})
        if tiny:
            stages = tuple(stage.model_copy(update={"validation_sequences": 8}) for stage in recipe.stages)
            recipe = recipe.model_copy(update={"stages": stages})
        train(recipe, folder / recipe.name, "python bench/gpu.py")
        model = AutoModelForCausalLM.from_pretrained(folder / recipe.name).eval()
        loss = text.losses(model, DataStream(recipe.stages, 2, tokenizer, folder))
        rows.append({"memory": name, "loss": float(loss.mean())})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--minutes", type=float, default=7.5)
    parser.add_argument("--tiny", action="store_true", help="short texts and a few steps: shows that it runs")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"))
    chosen = parser.parse_args()
    if chosen.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --device cpu --tiny runs the same on the CPU")
    clock = Clock(chosen.minutes)
    where = torch.cuda.get_device_name() if chosen.device == "cuda" else platform.machine()
    result: dict[str, Any] = {
        "device": where,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "executors": executors(chosen.device, 96 if chosen.tiny else 512),
    }
    lengths, rounds = ([128], 1) if chosen.tiny else ([512, 2048, 8192, 16_384], 3)
    result["speed"] = speed(chosen.device, lengths, rounds, clock.until(SHARES["speed"]))
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        result["cure"] = cure(chosen.device, folder / "cure", tiny=chosen.tiny, stop=clock.until(SHARES["cure"]))
        result["text"] = language(chosen.device, folder / "text", tiny=chosen.tiny, stop=clock.until(SHARES["text"]))
    chosen.json.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{where}, torch {torch.__version__}, transformers {transformers.__version__}; {chosen.json}")


if __name__ == "__main__":
    main()
