"""Executors: attention along a plan, for one row of a batch.

`attend_reference` is the meaning of a plan: dense attention under its mask. `attend_blocked` computes the same on a
CPU and reads only what the plan names. `isophase.prefill.execution.flex` does so on CUDA.

Legend: H query heads, K KV heads, G = H / K, T queries, L keys, D head width, Q blocks of queries, R queries per
block, n blocks of one call, E gathered keys.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from isophase.prefill.execution.plan import Plan

# Gathered keys and values of one call, in numbers of each: they are read again at once, so they should stay in cache.
_GATHERED_NUMBERS = 2**19
# Blocks of queries that read nearly as many keys share a call; shorter ones are padded by at most this share.
_PADDED_SHARE, _PADDED_KEYS = 1 / 16, 16

# Blocks of queries whose indices are made at once.
_STRIPE = 128

Attended = tuple[torch.Tensor, torch.Tensor]


def attend_reference(
    query_HTD: torch.Tensor, key_KLD: torch.Tensor, value_KLD: torch.Tensor, plan: Plan, *, scaling: float | None = None
) -> torch.Tensor:
    """Dense attention under the plan's mask.

    Args:
        query_HTD: queries, rotary applied, of the last T positions.
        key_KLD: keys; query head h reads KV head h * K // H.
        value_KLD: values.
        plan: what is read.
        scaling: factor of the logits; default D ** -0.5.

    Returns:
        [H, T, D].
    """
    group = query_HTD.shape[0] // key_KLD.shape[0]
    keys, values = (x.repeat_interleave(group, dim=0) for x in (key_KLD, value_KLD))
    result: torch.Tensor = torch.nn.functional.scaled_dot_product_attention(
        query_HTD[None], keys[None], values[None], attn_mask=plan.dense_mask()[None], scale=scaling
    )[0]
    return result


def attend_blocked(
    query_HTD: torch.Tensor, key_KLD: torch.Tensor, value_KLD: torch.Tensor, plan: Plan, *,
    scaling: float | None = None, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention along a plan with torch's CPU kernel, which is given only what is read.

    Each block of queries attends to its own keys with a causal mask, and without any mask to the gathered keys
    before them; the two are joined exactly by their log-sum-exps.

    Args:
        query_HTD: as `attend_reference`.
        key_KLD: as there.
        value_KLD: as there.
        plan: what is read; on the CPU.
        scaling: as there.
        out: where the result is written, [H, T, D]; default a new tensor.

    Returns:
        [H, T, D].
    """
    out_HTD = torch.empty(query_HTD.shape, dtype=query_HTD.dtype) if out is None else out
    group = query_HTD.shape[0] // key_KLD.shape[0]
    scale = query_HTD.shape[-1] ** -0.5 if scaling is None else scaling
    for kv_head in range(key_KLD.shape[0]):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        keys_LD, values_LD = key_KLD[kv_head], value_KLD[kv_head]
        lse_GT = _own_blocks(query_HTD[heads], keys_LD, values_LD, plan, scale, out_HTD[heads])
        for head in range(heads.start, heads.stop):
            _history(
                query_HTD[head], keys_LD.contiguous(), values_LD.contiguous(), plan, head, scale,
                out_HTD[head], lse_GT[head - heads.start],
            )  # fmt: skip
    return out_HTD


def attend_dense(
    query_HTD: torch.Tensor, key_KLD: torch.Tensor, value_KLD: torch.Tensor, *,
    scaling: float | None = None, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Dense causal attention of the last T positions on the CPU, without copies of keys for each query head.

    Args:
        query_HTD: as `attend_reference`.
        key_KLD: as there.
        value_KLD: as there.
        scaling: as there.
        out: as `attend_blocked`.

    Returns:
        [H, T, D].
    """
    heads, queries, width = query_HTD.shape
    group, before = heads // key_KLD.shape[0], key_KLD.shape[1] - queries
    scale = width**-0.5 if scaling is None else scaling
    out_HTD = torch.empty(query_HTD.shape, dtype=query_HTD.dtype) if out is None else out
    for kv_head in range(key_KLD.shape[0]):
        own = slice(kv_head * group, (kv_head + 1) * group)
        query = query_HTD[None, own]
        key, value = (x[None, kv_head : kv_head + 1].expand(-1, group, -1, -1) for x in (key_KLD, value_KLD))
        found, lse = _kernel(query, key[:, :, before:], value[:, :, before:], scale, causal=True)
        if before:
            past, past_lse = _kernel(query, key[:, :, :before], value[:, :, :before], scale, causal=False)
            found.lerp_(past, torch.sigmoid(past_lse - lse).to(found.dtype)[..., None])
        out_HTD[own] = found[0]
    return out_HTD


def _kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, causal: bool,
    mask: torch.Tensor | None = None,
) -> Attended:  # fmt: skip
    """Torch's CPU kernel: attention [B, H, T, D] and its log-sum-exp [B, H, T], float32."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=mask, scale=scale
    )
    return out, lse


def _own_blocks(
    query_GTD: torch.Tensor, key_LD: torch.Tensor, value_LD: torch.Tensor, plan: Plan, scale: float,
    out_GTD: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Attention of every block of queries to its own keys, into `out_GTD`; returns log-sum-exps [G, T]."""
    group, queries, width = query_GTD.shape
    size = plan.query_tokens
    whole = queries // size * size
    lse_GT = torch.empty(group, queries)
    step = max(1, _GATHERED_NUMBERS // (size * width * group)) * size
    parts = [(first, min(first + step, whole), size) for first in range(0, whole, step)]
    if whole < queries:
        parts.append((whole, queries, queries - whole))
    for first, last, rows in parts:
        shape = (-1, rows, width)
        queries_QGRD = query_GTD[:, first:last].view(group, -1, rows, width).transpose(0, 1)
        own = slice(plan.first_query + first, plan.first_query + last)
        keys_QGRD, values_QGRD = (x[own].reshape(shape)[:, None].expand(-1, group, -1, -1) for x in (key_LD, value_LD))
        mask = None
        if plan.window_tokens is not None and plan.window_tokens < rows:
            age_RR = torch.arange(rows)[:, None] - torch.arange(rows)
            mask = _additive((age_RR >= 0) & (age_RR < plan.window_tokens), query_GTD.dtype)[None, None]
        out, lse = _kernel(queries_QGRD, keys_QGRD, values_QGRD, scale, causal=mask is None, mask=mask)
        out_GTD[:, first:last].view(group, -1, rows, width).copy_(out.transpose(0, 1))
        lse_GT[:, first:last].view(group, -1, rows).copy_(lse.transpose(0, 1))
    return lse_GT


def _history(
    query_TD: torch.Tensor, key_LD: torch.Tensor, value_LD: torch.Tensor, plan: Plan, head: int, scale: float,
    out_TD: torch.Tensor, lse_T: torch.Tensor,
) -> None:  # fmt: skip
    """Join what a head reads before its own blocks to `out_TD`."""
    size, width = plan.query_tokens, query_TD.shape[-1]
    for blocks_n, keys_nE in _calls(plan, head, width):
        # Only the last block can be short; it then has a call of its own.
        rows = min(size, plan.queries - int(blocks_n[-1]) * size)
        at_nR = blocks_n[:, None] * size + torch.arange(rows)
        flat_E = keys_nE.clamp(min=0).flatten()
        shape = (len(blocks_n), 1, -1, width)
        keys, values = (x.index_select(0, flat_E).view(shape) for x in (key_LD, value_LD))
        at = at_nR.flatten()
        queries = query_TD.index_select(0, at).view(shape)
        out, lse = _kernel(
            queries, keys, values, scale, causal=False, mask=_history_mask(plan, at_nR, keys_nE, query_TD.dtype)
        )
        _join(out_TD, lse_T, at, out.reshape(-1, width), lse.reshape(-1))


def _join(
    out_TD: torch.Tensor, lse_T: torch.Tensor, at: torch.Tensor, more_nD: torch.Tensor, more_lse_n: torch.Tensor
) -> None:
    """Put two attentions over different keys together: weights are the shares of their exponential sums."""
    share_n = torch.sigmoid(more_lse_n - lse_T[at])
    joined = torch.lerp(out_TD.index_select(0, at), more_nD, share_n.to(out_TD.dtype)[:, None])
    out_TD.index_copy_(0, at, joined)


def _history_mask(plan: Plan, at_nR: torch.Tensor, keys_nE: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Additive mask [n, 1, 1 or R, E] for padded places and windows; None where all is read."""
    padded = bool((keys_nE < 0).any())
    if plan.window_tokens is not None:
        position_nR = at_nR + plan.first_query
        seen_nRE = keys_nE[:, None] > position_nR[..., None] - plan.window_tokens
        if not bool(seen_nRE.all()):
            return _additive(seen_nRE & (keys_nE >= 0)[:, None], dtype)[:, None]
    return _additive(keys_nE >= 0, dtype)[:, None, None] if padded else None


def _additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # Not -inf: a query may see none of the keys of a call, and its share must be 0 rather than undefined.
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min / 2)


def _calls(plan: Plan, head: int, width: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Blocks of queries that go into one call, long [n], and the keys that they read, long [n, E]; -1 is no key."""
    for first in range(0, len(plan.starts_Q), _STRIPE):
        yield from _stripe_calls(plan, head, width, slice(first, min(first + _STRIPE, len(plan.starts_Q))))


def _stripe_calls(plan: Plan, head: int, width: int, stripe: slice) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """As `_calls`, for neighbouring blocks of queries: indices of all at once would take more memory than outputs."""
    row_e, key_e = _pairs(plan, head, stripe)
    blocks = stripe.stop - stripe.start
    count_S = torch.bincount(row_e, minlength=blocks)
    key_e = key_e[row_e.argsort(stable=True)]
    first_S = count_S.cumsum(0) - count_S
    counts = count_S.tolist()
    ragged = blocks - 1 if stripe.stop == len(plan.starts_Q) and plan.queries % plan.query_tokens else -1
    call: list[int] = []

    def made() -> tuple[torch.Tensor, torch.Tensor]:
        blocks_n = torch.tensor(call)
        place_E = torch.arange(max(counts[b] for b in call))
        at_nE = first_S[blocks_n, None] + place_E
        real_nE = place_E < count_S[blocks_n, None]
        return blocks_n + stripe.start, key_e[at_nE.clamp(max=len(key_e) - 1)].masked_fill(~real_nE, -1)

    for block in count_S.argsort(stable=True).tolist():
        keys = counts[block]
        if keys == 0:
            continue
        if call and (
            keys > counts[call[0]] * (1 + _PADDED_SHARE) + _PADDED_KEYS
            or (len(call) + 1) * keys * width > _GATHERED_NUMBERS
            or ragged in (block, call[-1])
        ):
            yield made()
            call = []
        call.append(block)
    if call:
        yield made()


def _pairs(plan: Plan, head: int, stripe: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Every (block of the stripe, key before it) that a head reads, each once: two long tensors."""
    size, starts_S = plan.key_tokens, plan.starts_Q[stripe]
    chosen_SN = plan.blocks_HQN[head, stripe]
    row_m, block_m = chosen_SN.nonzero(as_tuple=True)
    key_m = (block_m[:, None] * size + torch.arange(size)).flatten()
    row_m = row_m.repeat_interleave(size)
    before = key_m < starts_S[row_m]
    if plan.window_tokens is not None:
        before &= key_m > starts_S[row_m] - plan.window_tokens
    row_m, key_m = row_m[before], key_m[before]
    column_C = plan.columns[head]
    if column_C.numel() == 0:
        return row_m, key_m
    alone_SC = (column_C < starts_S[:, None]) & ~chosen_SN[:, column_C // size]
    if plan.window_tokens is not None:
        alone_SC &= column_C > starts_S[:, None] - plan.window_tokens
    row_c, at_c = alone_SC.nonzero(as_tuple=True)
    return torch.cat([row_m, row_c]), torch.cat([key_m, column_C[at_c]])
