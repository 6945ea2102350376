"""Train one model from a recipe: `isophase train recipes/w8s8.yaml --out models/w8s8`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from accelerate import Accelerator, DistributedType
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from isophase import __version__
from isophase.errors import IsophaseError
from isophase.lab.train.checkpoint import RECORD, Progress, TrainingFolder, read_checkpoint, refuse_another_recipe
from isophase.lab.train.models import build_model, grid_of, load_tokenizer, pairs_tokenizer
from isophase.lab.train.recipe import Recipe
from isophase.lab.train.step import Predictor, open_accelerator, train_step, validation_loss
from isophase.lab.train.tasks.stream import DataStream
from isophase.models import TrainingRecord

__all__ = ["Cadence", "build_model", "pairs_tokenizer", "train", "train_step"]


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """When a checkpoint is written: after so many minutes, at a point of the curve; and every so many steps.

    Attributes:
        minutes: between checkpoints.
        steps: between checkpoints; None: minutes alone decide.
        keep_steps: between models that are kept, as `step-N` in the run's folder; None: only the last one is.
    """

    minutes: float = 5.0
    steps: int | None = None
    keep_steps: int | None = None


def train(
    recipe: Recipe,
    out: Path,
    command: str,
    console: Console | None = None,
    *,
    resume: bool = False,
    cadence: Cadence | None = None,
) -> TrainingRecord:
    """Train the recipe's model and save it with its curve and record.

    Every process of `accelerate launch` calls this; the first one writes.

    Args:
        recipe: what to train.
        out: folder for `config.json`, `model.safetensors`, the tokenizer, `curve.jsonl`,
            `recipe.json` and `training.json` (written last).
        command: how the user called this, for the record.
        console: where progress goes; None: nowhere.
        resume: go on with an unfinished run from its checkpoint; a finished one is left as it is.
        cadence: when checkpoints are written.

    Returns:
        The record, as in `training.json`.

    Raises:
        IsophaseError: for impossible settings, a folder that holds another run, or a loss that is no number.
    """
    if resume and (out / RECORD).exists():
        refuse_another_recipe(out, recipe)
        return TrainingRecord.model_validate_json((out / RECORD).read_text(encoding="utf-8"))
    accelerator = open_accelerator(recipe)
    folder = TrainingFolder(out, recipe, resume=resume) if accelerator.is_main_process else None
    try:
        # Dropout, where a model has it, draws from torch's own generator; the caller's is left as it was.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            run = _Run(recipe, out, folder, accelerator)
            run.train(cadence or Cadence(), console if accelerator.is_main_process else None)
            return run.save(command)
    finally:
        if folder is not None:
            folder.close()


class _Run:
    """One session of a training run."""

    def __init__(self, recipe: Recipe, out: Path, folder: TrainingFolder | None, accelerator: Accelerator) -> None:
        self.recipe, self.out, self.folder, self.accelerator = recipe, out, folder, accelerator
        torch.set_num_threads(recipe.threads)
        self.tokenizer = load_tokenizer(recipe)
        words = None if recipe.tokenizer is None else self.tokenizer
        with accelerator.main_process_first():
            self.data = DataStream(recipe.stages, recipe.seed, words, out.parent)
        self.validation = list(self.data.validation())
        self.model = build_model(recipe, words)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        if recipe.gradient_checkpointing:
            # The new name of transformers 5.24, else the old one.
            enable = getattr(self.model, "activation_checkpointing_enable", self.model.gradient_checkpointing_enable)
            enable({"use_reentrant": False})
        if recipe.compile:
            self.model.model.compile()
        state = read_checkpoint(out)
        if state is not None:
            self.model.load_state_dict(state["model"])
        optimiser = torch.optim.AdamW(
            self.model.parameters(), lr=0.0, betas=recipe.optimiser.betas, weight_decay=recipe.optimiser.weight_decay
        )
        self.predictor, self.optimiser = accelerator.prepare(Predictor(self.model), optimiser)
        self.progress = Progress()
        if state is not None:
            self.optimiser.load_state_dict(state["optimiser"])
            self.data.restore(state["data"])
            torch.set_rng_state(state["torch"])
            self.progress = Progress(**state["progress"])
        if folder is not None:
            folder.begin(self.progress.curve)

    def train(self, cadence: Cadence, console: Console | None) -> None:
        """Take all steps that are left."""
        recipe, progress = self.recipe, self.progress
        before, tokens_before, began = progress.seconds, progress.tokens, time.monotonic()
        saved = began
        with _bar(console) as bar:
            task = bar.add_task("training", total=recipe.steps, completed=progress.step, note="")
            for number, part in self.data.schedule(progress.step):
                batch = self.data.draw(part)
                rate = recipe.optimiser.rate(progress.step, recipe.steps)
                for group in self.optimiser.param_groups:
                    group["lr"] = rate
                loss, accuracy = train_step(
                    self.predictor,
                    self.optimiser,
                    batch.ids,
                    batch.labels,
                    recipe.optimiser.clip_norm,
                    self.accelerator,
                    recipe.micro_batch,
                )
                progress.step += 1
                if not math.isfinite(loss):
                    raise IsophaseError(f"the loss of step {progress.step} is {loss}.", "Lower the learning rate.")
                progress.recent.append((loss, accuracy))
                progress.sequences += part.batch
                progress.tokens += batch.ids.size
                progress.seconds = before + time.monotonic() - began
                at_point = progress.step % recipe.curve_every_steps == 0 or progress.step == recipe.steps
                if at_point:
                    self._add_point(number)
                    speed = (progress.tokens - tokens_before) / (progress.seconds - before)
                    point = progress.curve[-1]
                    note = f"loss {point['loss']:.3f}  accuracy {point['accuracy']:.3f}  {speed:,.0f} tokens/s"
                    bar.update(task, completed=progress.step, note=note)
                if cadence.keep_steps and progress.step % cadence.keep_steps == 0:
                    write = self._writer()
                    if self.folder is not None:
                        self.folder.keep_step(progress.step, write)
                due = cadence.steps is not None and progress.step % cadence.steps == 0
                due |= at_point and time.monotonic() - saved >= 60 * cadence.minutes
                if due and progress.step < recipe.steps:
                    self._checkpoint()
                    saved = time.monotonic()

    def save(self, command: str) -> TrainingRecord:
        """Write the model and the record; the run is then complete."""
        write = self._writer()
        if self.folder is not None:
            self.folder.write_model(write)
        record = self._record(command)
        if self.folder is not None:
            self.folder.finish(record.model_dump_json(indent=2) + "\n")
        self.accelerator.wait_for_everyone()
        return record

    def _writer(self) -> Callable[[Path], None]:
        """What writes the model's files into a folder. Every process calls this; the first one writes."""
        options: dict[str, Any] = {}
        if self.accelerator.distributed_type == DistributedType.FSDP:
            state = self.accelerator.get_state_dict(self.predictor)
            options["state_dict"] = {name.removeprefix("model."): value for name, value in state.items()}

        def write(folder: Path) -> None:
            self.model.save_pretrained(folder, **options)
            self.tokenizer.save_pretrained(folder)

        return write

    def _add_point(self, stage: int) -> None:
        progress, recipe = self.progress, self.recipe
        loss, accuracy = (float(v) for v in np.mean(progress.recent, axis=0))
        progress.recent.clear()
        point: dict[str, Any] = {
            "step": progress.step,
            "stage": stage,
            "loss": round(loss, 5),
            "accuracy": round(accuracy, 5),
        }
        last = progress.curve[-1]["step"] if progress.curve else 0
        crossed = progress.step // recipe.validate_every_steps > last // recipe.validate_every_steps
        if self.validation and (crossed or progress.step == recipe.steps):
            point["validation_loss"] = round(validation_loss(self.predictor, self.validation, self.accelerator), 5)
        progress.curve.append(point)
        if self.folder is not None:
            self.folder.append(point)

    def _checkpoint(self) -> None:
        # Sharded parameters are not gathered in the middle of a run (see docs/guides/train-matched-models.md).
        if self.folder is None or self.accelerator.distributed_type == DistributedType.FSDP:
            return
        self.folder.write_checkpoint(
            {
                "model": self.model.state_dict(),
                "optimiser": self.optimiser.state_dict(),
                "data": self.data.state(),
                "torch": torch.get_rng_state(),
                "progress": asdict(self.progress),
            }
        )

    def _record(self, command: str) -> TrainingRecord:
        recipe, progress, config = self.recipe, self.progress, self.model.config
        window, stride = grid_of(self.model)
        weights = list(self.out.glob("model*.safetensors"))
        return TrainingRecord(
            name=recipe.name,
            purpose=recipe.purpose,
            parameters=self.parameters,
            weights_bytes=sum(path.stat().st_size for path in weights),
            window_tokens=window,
            stride_tokens=stride,
            kv_heads=config.num_key_value_heads,
            layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            seed=recipe.seed,
            steps=recipe.steps,
            sequences=progress.sequences,
            tokens=progress.tokens,
            seconds=round(progress.seconds, 1),
            threads=recipe.threads,
            final_loss=progress.curve[-1]["loss"],
            final_accuracy=progress.curve[-1]["accuracy"],
            versions={
                "isophase": __version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            command=command,
            probe=recipe.probe,
        )


def _bar(console: Console | None) -> Bar:
    return Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}  {task.fields[note]}"),
        TimeRemainingColumn(),
        console=console or Console(quiet=True),
        disable=console is None,
        transient=True,
    )
