"""One optimiser step, on one device or spread over processes."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState
from torch import nn

from isophase.errors import IsophaseError
from isophase.lab.train.recipe import Recipe
from isophase.lab.train.tasks.lookup import IGNORED, Batch
from isophase.lab.train.tasks.stream import parts_of

Ids = npt.NDArray[np.int64]


class Predictor(nn.Module):
    """A language model whose `forward` returns loss and accuracy.

    All of a step happens in one `forward`, which is what the wrappers for many processes need.

    Args:
        model: backbone `model.model` and head `model.lm_head`.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        # accelerate's FSDP cuts the model at these.
        self._no_split_modules = model._no_split_modules

    def forward(self, ids_BT: torch.Tensor, labels_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean loss and accuracy over the tokens that are predicted.

        Args:
            ids_BT: int64 token ids.
            labels_BT: int64, -100 where nothing is predicted.
        """
        labels = labels_BT[:, 1:]
        predicted = labels != IGNORED
        # Only predicted positions go through the head: most of a lookup sequence is context.
        hidden = self.model.model(ids_BT, use_cache=False).last_hidden_state[:, :-1][predicted]
        logits = self.model.lm_head(hidden).float()
        loss = nn.functional.cross_entropy(logits, labels[predicted])
        routed = self.model.model.router_loss(ids_BT) if hasattr(self.model.model, "router_loss") else None
        if routed is not None and self.training:
            loss = loss + routed
        accuracy = (logits.argmax(dim=-1) == labels[predicted]).float().mean()
        return loss, accuracy


def open_accelerator(recipe: Recipe) -> Accelerator:
    """The devices and processes of a run: alone, or those that `accelerate launch` started.

    Raises:
        IsophaseError: for a precision that the device lacks, or a batch smaller than the number of processes.
    """
    # accelerate keeps its settings in a global; an earlier run in this process must not decide this one's.
    AcceleratorState._reset_state(reset_partial_state=int(os.environ.get("WORLD_SIZE", "1")) == 1)
    # With top-k selection the indexer's parameters take part without a gradient.
    unused = DistributedDataParallelKwargs(find_unused_parameters=recipe.architecture == "deepseek_v4")
    half = recipe.precision == "bf16" or (
        recipe.precision == "auto"
        and recipe.device == "auto"
        and torch.cuda.is_available()
        and torch.cuda.is_bf16_supported()
    )
    # Without being told, accelerate looks for no other CPU processes.
    cpu = recipe.device == "cpu" or not torch.accelerator.is_available()
    try:
        accelerator = Accelerator(cpu=cpu, mixed_precision="bf16" if half else "no", kwargs_handlers=[unused])
    except ValueError as error:
        raise IsophaseError(f"accelerate refuses these settings: {error}", "Set precision: fp32.") from error
    smallest = min(part.batch for part in parts_of(recipe.stages))
    if smallest < accelerator.num_processes:
        raise IsophaseError(
            f"a batch of {smallest} cannot be spread over {accelerator.num_processes} processes.",
            "Start fewer processes, or enlarge the stage's batch.",
        )
    return accelerator


def train_step(
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    ids_BT: Ids,
    labels_BT: Ids,
    clip_norm: float,
    accelerator: Accelerator | None = None,
    micro_batch: int | None = None,
) -> tuple[float, float]:
    """One optimiser step over a global batch, of which each process reads its share.

    Args:
        model: a language model; or, prepared by the accelerator, its `Predictor`.
        optimiser: prepared likewise.
        ids_BT: int64 token ids of the whole batch, the same in every process.
        labels_BT: int64, -100 where nothing is predicted.
        clip_norm: largest norm of the gradient.
        accelerator: None: this process alone, on the CPU.
        micro_batch: most sequences in one forward pass of a process; gradients are summed. None: all.

    Returns:
        Loss and accuracy over all predicted tokens of the global batch.
    """
    model.train()
    forward = model if isinstance(_inner(model), Predictor) else Predictor(model)
    rank, processes = (accelerator.process_index, accelerator.num_processes) if accelerator is not None else (0, 1)
    device = accelerator.device if accelerator is not None else torch.device("cpu")
    rows = np.array_split(np.arange(len(ids_BT)), processes)[rank]
    chunks = np.array_split(rows, -(-len(rows) // (micro_batch or len(rows))))
    optimiser.zero_grad(set_to_none=True)
    sums = torch.zeros(2, dtype=torch.float64)
    for chunk in chunks:
        # Wrappers average gradients over processes; they need to do so only once.
        wait = accelerator is not None and chunk is not chunks[-1]
        with accelerator.no_sync(model) if accelerator is not None and wait else nullcontext():
            loss, accuracy = forward(
                torch.from_numpy(ids_BT[chunk]).to(device), torch.from_numpy(labels_BT[chunk]).to(device)
            )
            # Tokens count alike wherever they are read.
            share = 1.0 if len(chunk) == len(ids_BT) else _predicted(labels_BT[chunk]) / _predicted(labels_BT)
            sums += torch.tensor([float(loss.detach()) * share, float(accuracy) * share], dtype=torch.float64)
            scaled = loss if share == 1.0 else loss * (share * processes)
            scaled.backward() if accelerator is None else accelerator.backward(scaled)
    if accelerator is None:
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    else:
        accelerator.clip_grad_norm_(model.parameters(), clip_norm)
    optimiser.step()
    if accelerator is not None and processes > 1:
        sums = accelerator.reduce(sums.to(device), reduction="sum")
    total_loss, total_accuracy = sums.tolist()
    return total_loss, total_accuracy


@torch.no_grad()
def validation_loss(model: nn.Module, batches: list[Batch], accelerator: Accelerator) -> float:
    """Mean loss over all predicted tokens of the batches; every process reads all of them.

    Args:
        model: a prepared `Predictor`.
        batches: the same in every process.
        accelerator: devices and processes.
    """
    model.eval()
    total, count = 0.0, 0
    for batch in batches:
        ids, labels = (torch.from_numpy(array).to(accelerator.device) for array in (batch.ids, batch.labels))
        predicted = _predicted(batch.labels)
        total += float(model(ids, labels)[0]) * predicted
        count += predicted
    model.train()
    return total / count


def _predicted(labels_BT: Ids) -> int:
    """Number of tokens that are predicted."""
    return int((labels_BT[:, 1:] != IGNORED).sum())


def _inner(model: nn.Module) -> object:
    """Below the wrappers for many processes."""
    inner: object = model
    while isinstance(inner, nn.Module) and isinstance(getattr(inner, "module", None), nn.Module):
        inner = inner.module
    return inner
