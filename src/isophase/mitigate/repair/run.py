"""Repair a trained model: move, average or refit the gates' parameters by offset, or change the grid and fine-tune.

Calibration, choice and judgement use prompts of different seeds. The loss weighs phases by how badly they do
(group-robust training), so that the worst phase rises instead of the mean. Nothing is kept that lowers the mean.

Legend: I items, P positions of the window, S phases, B prompts of a batch, A answer tokens.

Source: Sagawa et al. (arXiv 1911.08731) for the weights by group; the groups are phases here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from isophase.errors import IsophaseError
from isophase.lab.explain import GateBranch, Questions, Remake, ask, average, changed, gate_branches, questions_of, roll
from isophase.models import CompressedQwen3Config, CompressedQwen3ForCausalLM
from isophase.probes import ProbeSettings, Tokenizer, build_probe
from isophase.statistics import straddling_phases, wilson

Method = Literal["flatten", "roll", "refit", "regrid"]
METHODS: tuple[Method, ...] = ("flatten", "roll", "refit", "regrid")

_SEEDS = {"calibrate": 1_001, "choose": 2_002, "judge": 3_003}
_BATCH = 48
_ROBUSTNESS = 0.05
"""How fast the weight of a phase grows with its loss."""
_TOLERATED_POINTS = 1.0
"""A repair whose mean lies further below the original's is not kept."""


class Curve(BaseModel):
    """Accuracy by phase at one moment.

    Attributes:
        by_phase: share of right answers.
        prompts_by_phase: behind each.
    """

    model_config = ConfigDict(frozen=True)

    by_phase: list[float]
    prompts_by_phase: int

    @property
    def mean(self) -> float:
        """Over all phases."""
        return float(np.mean(self.by_phase))

    @property
    def worst(self) -> float:
        """At the worst phase."""
        return min(self.by_phase)

    @property
    def worst_phase(self) -> int:
        """Which it is."""
        return int(np.argmin(self.by_phase))

    @property
    def worst_interval(self) -> tuple[float, float]:
        """Wilson, 95 %."""
        low, high = wilson(self.worst * self.prompts_by_phase, self.prompts_by_phase)
        return float(low), float(high)

    @property
    def mean_interval(self) -> tuple[float, float]:
        """Wilson, 95 %."""
        prompts = self.prompts_by_phase * len(self.by_phase)
        low, high = wilson(self.mean * prompts, prompts)
        return float(low), float(high)


class Repair(BaseModel):
    """What a repair came to, as in `repair.json`."""

    model_config = ConfigDict(frozen=True)

    method: Method
    stride_tokens: int
    before: Curve
    after: Curve
    kept: bool = Field(description="whether it is better on prompts that decided nothing")
    change: str = Field(description="what was done, in words")
    boundary_phases: list[int] = Field(description="phases at which a chunk edge cuts the record")
    steps: list[tuple[int, float, float]] = Field(description="step, worst phase and mean while it was trained")
    kept_step: int = Field(description="step whose parameters were kept; 0: those before training")
    parameters: int = Field(description="numbers that were changed")


@dataclass(frozen=True, kw_only=True)
class RepairSettings:
    """How to repair.

    Attributes:
        method: `flatten` (every offset gets the mean of all), `roll` (offsets change places; the best roll),
            `refit` (gradient steps on gates alone), `regrid` (another memory, all parameters fine-tuned).
        probe: of calibration and judgement: records, prefix or in-sequence.
        records: records in each prompt.
        length_tokens: of each prompt.
        items: items of choice and judgement, each asked at every phase.
        steps: of `refit` and `regrid`.
        learning_rate: of Adam.
        memory: settings of `CompressedQwen3Config` that `regrid` changes.
        seed: of everything drawn.
    """

    method: Method
    probe: str = "records"
    records: int = 24
    length_tokens: int = 114
    items: int = 48
    steps: int = 240
    learning_rate: float = 3e-3
    memory: dict[str, Any] | None = None
    seed: int = 0


def repair(
    model: Any, tokenizer: Tokenizer, settings: RepairSettings, say: Callable[[str], object] = lambda _: None
) -> tuple[Any, Repair]:
    """Repair a model.

    Args:
        model: `compressed_qwen3` or `deepseek_v4` in evaluation mode; changed in place, but for `regrid`.
        tokenizer: of the model.
        settings: how.
        say: told of progress.

    Returns:
        The model that was tried, and what it came to: only where `kept` is set is it worth keeping. Where no
        change was found on the prompts of choice, that is the model as it was.

    Raises:
        IsophaseError: the model has no fixed grid, or no gates by offset.
    """
    branches = gate_branches(model)
    if not branches:
        raise IsophaseError("this model has no gates on a fixed grid: there is nothing to repair.")
    stride = branches[0].stride_tokens
    choose, judge = (_questions(tokenizer, settings, stride, part) for part in ("choose", "judge"))
    say("measuring the model as it is")
    before = _curve(model, judge, stride)
    trained = _Trained([], 0)
    if settings.method in ("flatten", "roll"):
        change = _best_exchange(model, branches, choose, stride, settings.method)
        count = sum(p.numel() for p in _gate_parameters(branches))
        repaired = model
    elif settings.method == "refit":
        parameters = _gate_parameters(branches)
        trained = _fine_tune(model, parameters, tokenizer, settings, stride, choose, say)
        count, repaired = sum(p.numel() for p in parameters), model
        change = f"{count:,} gate parameters refitted in {trained.kept_step} steps" if trained.kept_step else ""
    else:
        memory = settings.memory or {"grid_shift": "heads"}
        repaired = _with_memory(model, memory)
        parameters = list(repaired.parameters())
        trained = _fine_tune(repaired, parameters, tokenizer, settings, stride, choose, say, from_scratch=True)
        count = sum(p.numel() for p in parameters)
        change = f"memory changed ({_written(memory)}), all parameters fine-tuned for {trained.kept_step} steps"
    after = _curve(repaired, judge, stride)
    kept = bool(change) and after.worst > before.worst and after.mean >= before.mean - _TOLERATED_POINTS / 100
    return repaired, Repair(
        method=settings.method,
        stride_tokens=stride,
        before=before,
        after=after,
        kept=kept,
        boundary_phases=straddling_phases(stride, judge.span_tokens),
        change=change or "nothing that was tried raised the worst phase without lowering the mean",
        steps=trained.trail,
        kept_step=trained.kept_step,
        parameters=count,
    )


def _questions(tokenizer: Tokenizer, settings: RepairSettings, stride: int, part: str, round_: int = 0) -> Questions:
    seed = settings.seed * 10_007 + _SEEDS[part] + 7919 * round_
    items = settings.items if part != "calibrate" else _BATCH
    probe = ProbeSettings.model_validate(
        {
            "probe": settings.probe,
            "items": items,
            "records": settings.records,
            "length_tokens": settings.length_tokens,
            "window_tokens": stride,
            "seed": seed,
        }
    )
    return questions_of(build_probe(probe, tokenizer))


def _curve(model: Any, questions: Questions, stride: int) -> Curve:
    observations = ask(model, questions)
    return Curve(
        by_phase=observations.lap_means(stride).mean(axis=0).tolist(),
        prompts_by_phase=observations.items,
    )


def _gate_parameters(branches: list[GateBranch]) -> list[nn.Parameter]:
    """Gates, each once; an indexer's choose entries and make none, so they stay."""
    found = [p for branch in branches if branch.name != "indexer" for p in branch.gates]
    if not found:
        raise IsophaseError("the gates of this model do not belong to an offset: there is nothing to refit.")
    return list(dict.fromkeys(found))


def _best_exchange(model: Any, branches: list[GateBranch], questions: Questions, stride: int, method: Method) -> str:
    """Try exchanges of gate parameters between offsets and carry out the best; its name, or empty if none helps."""
    parameters = _gate_parameters(branches)
    tried: dict[str, Remake] = {"every offset has the mean gate": average(stride)}
    if method == "roll":
        tried = {f"gates moved {delta} offsets further": roll(delta, stride) for delta in range(1, stride)}
    start = _curve(model, questions, stride)
    best, chosen = start.worst, ""
    for name, remake in tried.items():
        with changed(parameters, remake):
            found = _curve(model, questions, stride)
        if found.worst > best and found.mean >= start.mean - _TOLERATED_POINTS / 100:
            best, chosen = found.worst, name
    if chosen:
        with torch.no_grad():
            for parameter in parameters:
                parameter.copy_(tried[chosen](parameter.detach().clone()))
    return chosen


def _written(memory: dict[str, Any]) -> str:
    """Settings in words; long lists by their length."""
    shown = {k: f"{len(v)} numbers" if isinstance(v, list) and len(v) > 8 else v for k, v in memory.items()}
    return ", ".join(f"{key}={value}" for key, value in shown.items())


def _with_memory(model: Any, memory: dict[str, Any]) -> CompressedQwen3ForCausalLM:
    """The model with another memory; parameters of equal name and shape are taken over, of windows as many as fit."""
    if not isinstance(model.config, CompressedQwen3Config):
        raise IsophaseError("only compressed_qwen3 models can have another memory.", "Use --method refit.")
    try:
        config = CompressedQwen3Config(**{**model.config.to_dict(), **memory})
    except (ValueError, TypeError) as error:
        raise IsophaseError(f"this memory is impossible: {error}.") from error
    other = CompressedQwen3ForCausalLM(config)
    own = model.state_dict()
    with torch.no_grad():
        for name, parameter in other.state_dict().items():
            source = own.get(name)
            if source is None:
                continue
            if source.shape == parameter.shape:
                parameter.copy_(source)
            elif source.shape[1:] == parameter.shape[1:]:
                # Slots that the old window lacks begin as its last one.
                index = torch.arange(parameter.shape[0]).clamp(max=source.shape[0] - 1)
                parameter.copy_(source[index])
    other.eval()
    return other


def _batches(tokenizer: Tokenizer, settings: RepairSettings, stride: int) -> Iterator[tuple[Questions, torch.Tensor]]:
    """Endless calibration prompts: one of every item at a phase drawn at random."""
    rng = np.random.default_rng([settings.seed, _SEEDS["calibrate"]])
    round_ = 0
    while True:
        questions = _questions(tokenizer, settings, stride, "calibrate", round_)
        columns = questions.positions.shape[1]
        order = np.argsort(rng.random((len(questions.positions), columns)), axis=1)
        for n in range(columns):
            yield questions, torch.from_numpy(np.arange(len(order)) * columns + order[:, n])
        round_ += 1


class _Trained(NamedTuple):
    """Step, worst phase and mean at each measurement, and the step whose parameters were kept."""

    trail: list[tuple[int, float, float]]
    kept_step: int


class _PhaseWeights:
    """Weights of phases that grow where the loss is large: exponentiated-gradient ascent beside the descent."""

    def __init__(self, stride: int, device: torch.device) -> None:
        self.stride = stride
        self.weights_S = torch.full((stride,), 1 / stride, device=device)

    def loss(self, loss_B: torch.Tensor, phases_B: torch.Tensor) -> torch.Tensor:
        """The batch's weighted loss; the weights are moved first."""
        share_S = torch.zeros_like(self.weights_S).index_add(0, phases_B, loss_B.detach())
        count_S = torch.bincount(phases_B, minlength=self.stride)
        grown_S = self.weights_S * torch.exp(_ROBUSTNESS * share_S / count_S.clamp(min=1))
        self.weights_S = grown_S / grown_S.sum()
        return (self.weights_S[phases_B] * self.stride * loss_B).mean()


def _loss_of(model: Any, questions: Questions, rows: torch.Tensor) -> torch.Tensor:
    """Mean loss of each prompt's answer tokens, [B]."""
    keep = questions.answer_tokens
    logits = model(questions.ids[rows].to(model.device), use_cache=False, logits_to_keep=keep).logits.float()
    answers = questions.answers[rows].to(model.device)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten(), reduction="none")
    return loss.view(len(rows), keep).mean(dim=1)


@contextmanager
def _only_trained(model: Any, parameters: list[nn.Parameter]) -> Iterator[None]:
    """Gradients for some parameters only, as long as it lasts."""
    needed, wanted = [p.requires_grad for p in model.parameters()], set(parameters)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter in wanted)
    try:
        yield
    finally:
        for parameter, was in zip(model.parameters(), needed, strict=True):
            parameter.requires_grad_(was)


def _fine_tune(
    model: Any,
    parameters: list[nn.Parameter],
    tokenizer: Tokenizer,
    settings: RepairSettings,
    stride: int,
    choose: Questions,
    say: Callable[[str], object],
    *,
    from_scratch: bool = False,
) -> _Trained:
    """Robust gradient steps; the parameters end as they were at the best measurement.

    Args:
        model: trained in place.
        parameters: those that are trained.
        tokenizer: of the model.
        settings: of the repair.
        stride: S.
        choose: prompts that decide what is kept.
        say: told of progress.
        from_scratch: whether the state before training is no candidate, as behind a change of the memory.
    """
    optimiser = torch.optim.Adam(parameters, lr=settings.learning_rate)
    weights = _PhaseWeights(stride, model.device)
    start = _curve(model, choose, stride)
    trail = [(0, start.worst, start.mean)]
    least_mean = -1.0 if from_scratch else start.mean - _TOLERATED_POINTS / 100
    best, kept_step, kept = -1.0 if from_scratch else start.worst, 0, [p.detach().clone() for p in parameters]
    every = max(1, settings.steps // 8)
    batches = _batches(tokenizer, settings, stride)
    with _only_trained(model, parameters):
        for step in range(1, settings.steps + 1):
            questions, rows = next(batches)
            phases_B = torch.from_numpy(questions.positions.reshape(-1) % stride)[rows].to(model.device)
            rate = min(1.0, step / 20, (settings.steps - step + 1) / (0.3 * settings.steps))
            for group in optimiser.param_groups:
                group["lr"] = settings.learning_rate * rate
            optimiser.zero_grad(set_to_none=True)
            torch.autograd.backward(weights.loss(_loss_of(model, questions, rows), phases_B))
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimiser.step()
            if step % every == 0 or step == settings.steps:
                found = _curve(model, choose, stride)
                trail.append((step, found.worst, found.mean))
                say(f"step {step} of {settings.steps}: worst phase {found.worst:.2f}, mean {found.mean:.2f}")
                if found.worst > best and found.mean >= least_mean:
                    best, kept_step, kept = found.worst, step, [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.copy_(value)
    return _Trained(trail, kept_step)
