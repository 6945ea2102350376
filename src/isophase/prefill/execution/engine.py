"""One row of one layer: look at sampled queries, choose, attend.

Legend: H query heads, K KV heads, T queries, L keys, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from isophase.prefill.choose.adapt import Choice
from isophase.prefill.choose.machine import PAYS_BELOW, Costs
from isophase.prefill.choose.policy import Policy
from isophase.prefill.execution.blocked import attend_blocked, attend_dense
from isophase.prefill.execution.flex import attend_flex
from isophase.prefill.execution.plan import Plan, full_plan
from isophase.prefill.execution.threads import side_by_side, threads, threads_by_piece
from isophase.prefill.patterns import Dense, Reads
from isophase.prefill.patterns.spec import write_pattern
from isophase.prefill.run import CallRun, Clock, HeadRun
from isophase.prefill.sample import Geometry, Sampling, sample_head

# Longer prompts are cut into longer blocks of keys: tables of blocks grow with the square of their number.
_LONG_TOKENS = 2**15
_STRIPE = 128
# Queries that are attended to densely in one piece, where pieces are many: torch's kernel works on 256 at once.
_PART = 1024


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
        saved = 0.0
        heads = tuple(HeadRun(pattern="window", density=1.0, recall=None) for _ in query_HTD)
        why = "sliding window, read exactly"
    else:
        geometry = settings.geometry(tokens, first, query_HTD.device)
        out_HTD = torch.empty_like(query_HTD) if out is None else out
        read = _by_head if query_HTD.device.type == "cpu" else _on_device
        done = read(query_HTD, key_KLD, value_KLD, settings, geometry, layer, scale, clock, out_HTD)
        saved = _saved([choice for choice, _ in done], settings, geometry, layer)
        why = "sparse" if any(choice.reads is not None for choice, _ in done) else "no head pays"
        heads = tuple(
            HeadRun(pattern=write_pattern(choice.pattern), density=density, recall=choice.recall)
            for choice, density in done
        )
    call = CallRun(
        layer=layer, row=row, tokens=tokens, queries=query_HTD.shape[1], why=why, heads=heads, saved=saved,
        seconds=clock.seconds,
    )  # fmt: skip
    return out_HTD, call


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


def _look(
    query_TD: torch.Tensor, key_LD: torch.Tensor, head: int, settings: Settings, geometry: Geometry, layer: int,
    scale: float, clock: Clock,
) -> Choice:  # fmt: skip
    """What a head reads; everything, where less does not pay."""
    whole = Choice(pattern=Dense(), reads=None, recall=1.0, keys_per_query=float(geometry.tokens))
    if settings.policy.is_dense(layer, head):
        return whole
    with clock.part("look"):
        sample = sample_head(query_TD, key_LD, geometry, settings.sampling, scaling=scale)
    with clock.part("choose"):
        choice = settings.policy.choose(layer, head, sample)
    costs = settings.costs
    return choice if costs is None or costs.sparse_share(choice.keys_per_query, geometry) <= PAYS_BELOW else whole


def _saved(choices: list[Choice], settings: Settings, geometry: Geometry, layer: int) -> float:
    """As `CallRun.saved`."""
    costs = settings.costs
    if costs is None:
        return 0.0
    looked = [not settings.policy.is_dense(layer, head) for head in range(len(choices))]
    saved = sum(1 - costs.sparse_share(c.keys_per_query, geometry) for c in choices if c.reads is not None)
    cost = costs.look_share(geometry, threads_by_piece(len(choices)))
    return (saved - cost * sum(looked)) / len(choices)


def look(
    query_HTD: torch.Tensor, key_KLD: torch.Tensor, settings: Settings, geometry: Geometry, *, layer: int = 0,
    scaling: float | None = None, clock: Clock | None = None,
) -> list[Choice]:  # fmt: skip
    """What each head of a row reads; nothing is attended to.

    Args:
        query_HTD: as for `attend_row`.
        key_KLD: the same.
        settings: how it would be read.
        geometry: how the prompt is cut.
        layer: number of the layer, for tables of patterns.
        scaling: factor of the logits; default D ** -0.5.
        clock: takes the time; None: nobody asks.
    """
    group = len(query_HTD) // len(key_KLD)
    scale = query_HTD.shape[-1] ** -0.5 if scaling is None else scaling
    clock = clock or Clock(_waiter(query_HTD.device))
    return [
        _look(query_TD, key_KLD[head // group], head, settings, geometry, layer, scale, clock)
        for head, query_TD in enumerate(query_HTD)
    ]


def _on_device(
    query_HTD: torch.Tensor, key_KLD: torch.Tensor, value_KLD: torch.Tensor, settings: Settings, geometry: Geometry,
    layer: int, scale: float, clock: Clock, out_HTD: torch.Tensor,
) -> list[tuple[Choice, float]]:  # fmt: skip
    """One launch for all heads, dense ones included; returns choices and densities."""
    choices = look(query_HTD, key_KLD, settings, geometry, layer=layer, scaling=scale, clock=clock)
    with clock.part("choose"):
        plan = make_plan([choice.reads for choice in choices], geometry)
        density = plan.density().tolist()
    with clock.part("attend"):
        out_HTD.copy_(attend_flex(query_HTD, key_KLD, value_KLD, plan, scaling=scale))
    return list(zip(choices, density, strict=True))


def _by_head(
    query_HTD: torch.Tensor, key_KLD: torch.Tensor, value_KLD: torch.Tensor, settings: Settings, geometry: Geometry,
    layer: int, scale: float, clock: Clock, out_HTD: torch.Tensor,
) -> list[tuple[Choice, float]]:  # fmt: skip
    """Heads side by side on the threads of the CPU; returns choices and densities."""
    heads = len(query_HTD)
    group = heads // len(key_KLD)

    def tensors(head: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        kv = slice(head // group, head // group + 1)
        return query_HTD[head : head + 1], key_KLD[kv], value_KLD[kv]

    def look_at(head: int) -> Choice:
        query, key, _ = tensors(head)
        with threads(1):  # many short steps: handing each to several threads costs more than it saves
            return _look(query[0], key[0], head, settings, geometry, layer, scale, clock)

    def sparse(head: int) -> float:
        reads = choices[head].reads
        if reads is None:
            return 1.0
        with clock.part("choose"):
            plan = make_plan([reads], geometry)
            density = float(plan.density()[0])
        with clock.part("attend"):
            attend_blocked(*tensors(head), plan, scaling=scale, out=out_HTD[head : head + 1])
        return density

    def dense(part: tuple[int, int, int]) -> None:
        head, begin, end = part
        query, key, value = tensors(head)
        seen = geometry.first_query + end
        with clock.part("dense"):
            attend_dense(
                query[:, begin:end], key[:, :seen], value[:, :seen], scaling=scale,
                out=out_HTD[head : head + 1, begin:end],
            )  # fmt: skip

    with side_by_side(heads) as crew:
        # All look before any attends: what looking needs is gone by the time that results take memory.
        choices = crew.map(look_at, range(heads))
        densities = crew.map(sparse, range(heads))
        whole = [head for head, choice in enumerate(choices) if choice.reads is None]
        crew.map(dense, [(head, *part) for part in _parts(geometry.queries) for head in whole])
    return list(zip(choices, densities, strict=True))


def _parts(queries: int) -> list[tuple[int, int]]:
    """Stretches of queries, the longest work first: what is handed out last should be short, so that none waits."""
    step = max(_PART, -(-queries // 4 // _PART) * _PART)
    return [(begin, min(begin + step, queries)) for begin in range(0, queries, step)][::-1]


def _waiter(device: torch.device) -> Callable[[], None]:
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)
