"""One row of one layer: look at sampled queries, choose, attend.

Legend: H query heads, K KV heads, T queries, L keys, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from isophase.prefill.adapt import Choice
from isophase.prefill.execute import attend_blocked, attend_dense
from isophase.prefill.flex import attend_flex
from isophase.prefill.machine import PAYS_BELOW, Costs, one_thread
from isophase.prefill.patterns import Dense, Reads
from isophase.prefill.plan import Plan, full_plan
from isophase.prefill.policy import Policy
from isophase.prefill.run import CallRun, Clock, HeadRun
from isophase.prefill.sample import Geometry, Sampling, sample_head
from isophase.prefill.spec import write_pattern

# Longer prompts are cut into longer blocks of keys: tables of blocks grow with the square of their number.
_LONG_TOKENS = 2**15
_STRIPE = 128


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How rows are read.

    Attributes:
        policy: decides what heads read.
        sampling: which queries are looked at.
        costs: of this machine; None reads sparsely whether it pays or not.
        query_tokens: queries per block.
        key_tokens: keys per block; None: 16, and 32 from 32,768 tokens.
    """

    policy: Policy
    sampling: Sampling
    costs: Costs | None
    query_tokens: int = 128
    key_tokens: int | None = None

    def geometry(self, tokens: int, first_query: int, device: torch.device) -> Geometry:
        """How a prompt of this length is cut."""
        key_tokens = self.key_tokens or (32 if tokens >= _LONG_TOKENS else 16)
        return Geometry(
            tokens=tokens, first_query=first_query, query_tokens=self.query_tokens, key_tokens=key_tokens, device=device
        )


def attend_row(
    query_HTD: torch.Tensor, key_KLD: torch.Tensor, value_KLD: torch.Tensor, settings: Settings, *, layer: int = 0,
    row: int = 0, scaling: float | None = None, window_tokens: int | None = None, out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, CallRun]:  # fmt: skip
    """Attention of one prompt, or of its last part, without padding.

    Args:
        query_HTD: queries of the last T positions, rotary applied.
        key_KLD: keys of all L positions.
        value_KLD: values.
        settings: how it is read.
        layer: number of the layer, for tables of patterns and the report.
        row: of the batch, for the report.
        scaling: factor of the logits; default D ** -0.5.
        window_tokens: of a sliding layer. It is read exactly, without what lies outside.
        out: where the result is written, [H, T, D]; default a new tensor.

    Returns:
        [H, T, D], and what was done.
    """
    tokens, first = key_KLD.shape[1], key_KLD.shape[1] - query_HTD.shape[1]
    scale = query_HTD.shape[-1] ** -0.5 if scaling is None else scaling
    clock = Clock(_waiter(query_HTD.device))
    if window_tokens is not None and window_tokens < tokens:
        plan = full_plan(
            len(query_HTD), tokens, first_query=first, query_tokens=settings.query_tokens,
            window_tokens=window_tokens, device=query_HTD.device,
        )  # fmt: skip
        with clock.part("attend"):
            out_HTD = execute(query_HTD, key_KLD, value_KLD, plan, scale, out)
        heads = tuple(HeadRun(pattern="window", density=1.0, recall=None) for _ in query_HTD)
        why = "sliding window, read exactly"
    else:
        geometry = settings.geometry(tokens, first, query_HTD.device)
        choices = _choose(query_HTD, key_KLD, settings, geometry, layer, scale, clock)
        out_HTD = torch.empty_like(query_HTD) if out is None else out
        heads = _attend(query_HTD, key_KLD, value_KLD, choices, geometry, scale, clock, out_HTD)
        why = "sparse" if any(choice.reads is not None for choice in choices) else "no head pays"
    done = CallRun(
        layer=layer, row=row, tokens=tokens, queries=query_HTD.shape[1], why=why, heads=heads, seconds=clock.seconds
    )
    return out_HTD, done


def execute(
    query_HTD: torch.Tensor, key_KLD: torch.Tensor, value_KLD: torch.Tensor, plan: Plan, scaling: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention along a plan with the executor of the device, into `out` or a new tensor."""
    if query_HTD.device.type == "cpu":
        return attend_blocked(query_HTD, key_KLD, value_KLD, plan, scaling=scaling, out=out)
    found = attend_flex(query_HTD, key_KLD, value_KLD, plan, scaling=scaling)
    return found if out is None else out.copy_(found)


def make_plan(reads: list[Reads | None], geometry: Geometry) -> Plan:
    """The plan of several heads; None reads everything.

    Args:
        reads: of each head.
        geometry: how the prompt is cut.
    """
    none = torch.empty(0, dtype=torch.long, device=geometry.device)
    blocks = len(geometry.starts_Q)
    chosen_HQN = torch.empty(len(reads), blocks, geometry.key_blocks, dtype=torch.bool, device=geometry.device)
    for first in range(0, blocks, _STRIPE):
        # A stripe at a time: distances are numbers, and there are as many of them as of blocks.
        part_S = torch.arange(first, min(first + _STRIPE, blocks), device=geometry.device)
        for head, read in enumerate(reads):
            before = geometry.distance_QN(geometry.starts_Q[part_S]) >= 0 if read is None else read.at(part_S)
            chosen_HQN[head, first : first + _STRIPE] = before
    return Plan(
        blocks_HQN=chosen_HQN,
        columns=tuple(none if read is None else read.columns for read in reads),
        tokens=geometry.tokens, first_query=geometry.first_query,
        query_tokens=geometry.query_tokens, key_tokens=geometry.key_tokens,
    )  # fmt: skip


def _choose(
    query_HTD: torch.Tensor, key_KLD: torch.Tensor, settings: Settings, geometry: Geometry, layer: int, scale: float,
    clock: Clock,
) -> list[Choice]:  # fmt: skip
    """What each head reads; heads for which it does not pay read everything."""
    group, costs = len(query_HTD) // len(key_KLD), settings.costs
    whole = Choice(pattern=Dense(), reads=None, recall=1.0, keys_per_query=float(geometry.tokens))
    choices = []
    with one_thread():
        for head, query_TD in enumerate(query_HTD):
            if settings.policy.is_dense(layer, head):
                choices.append(whole)
                continue
            with clock.part("look"):
                sample = sample_head(query_TD, key_KLD[head // group], geometry, settings.sampling, scaling=scale)
            with clock.part("choose"):
                choice = settings.policy.choose(layer, head, sample)
            pays = costs is None or costs.sparse_share(choice.keys_per_query, geometry) <= PAYS_BELOW
            choices.append(choice if pays else whole)
    return choices


def _attend(
    query_HTD: torch.Tensor, key_KLD: torch.Tensor, value_KLD: torch.Tensor, choices: list[Choice],
    geometry: Geometry, scale: float, clock: Clock, out_HTD: torch.Tensor,
) -> tuple[HeadRun, ...]:  # fmt: skip
    """Sparse heads along their plan, the others densely, into `out_HTD`."""
    group = len(query_HTD) // len(key_KLD)
    density = [1.0] * len(choices)
    if query_HTD.device.type != "cpu":
        # One launch for all heads, dense ones included.
        with clock.part("choose"):
            plan = make_plan([choice.reads for choice in choices], geometry)
            density = plan.density().tolist()
        with clock.part("attend"):
            out_HTD.copy_(attend_flex(query_HTD, key_KLD, value_KLD, plan, scaling=scale))
    else:
        for head, choice in enumerate(choices):
            one, kv = slice(head, head + 1), slice(head // group, head // group + 1)
            inputs = query_HTD[one], key_KLD[kv], value_KLD[kv]
            if choice.reads is None:
                with clock.part("dense"):
                    attend_dense(*inputs, scaling=scale, out=out_HTD[one])
                continue
            with clock.part("choose"):
                plan = make_plan([choice.reads], geometry)
                density[head] = float(plan.density()[0])
            with clock.part("attend"):
                attend_blocked(*inputs, plan, scaling=scale, out=out_HTD[one])
    return tuple(
        HeadRun(pattern=write_pattern(choice.pattern), density=share, recall=choice.recall)
        for choice, share in zip(choices, density, strict=True)
    )


def _waiter(device: torch.device) -> Callable[[], None]:
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)
