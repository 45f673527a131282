"""Kimi Delta Attention in plain torch: gate, normalisation, the token loop that defines it, and the decode step.

The chunked form, which computes the same thing with matrix products, is `kda_chunk` (from `kda_forward.py`).

Shapes: B batch, T time, H heads, K key dim, V value dim, N sequences (B, or the packed sequences of `cu_seqlens`).
Compute dtype: float64 if any floating input is float64, else float32.

Sources: Kimi Linear (arXiv 2510.26692), section 4 of the project's K3 specification.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from . import native
from .kda_forward import kda_chunk
from .kda_layout import check_inputs, sequence_bounds
from .precision import compute_dtype

__all__ = ["kda_chunk", "kda_gate", "kda_recurrent", "kda_step", "l2norm"]

STEP_CACHE = 6 * 2**20  # bytes of states that one decode step works on at once: they stay in the last-level cache
LOOKUP_BYTES = 2**20  # states smaller than this are read by a matrix product: fewer calls matter more than speed


def kda_gate(raw: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, lower_bound: float | None = None) -> Tensor:
    """Log decay of KDA from the gate projection.

    Args:
        raw: [..., H, K] any float dtype, the gate projection before its bias.
        A_log: [H], log of the per-head rate.
        dt_bias: [H * K] or [H, K], or None.
        lower_bound: negative number for the bounded gate (Kimi K3: -5), None for the softplus gate (Kimi Linear).

    Returns:
        Log decay [..., H, K] in the compute dtype: `lower_bound * sigmoid(exp(A_log) * (raw + dt_bias))`, in
        (lower_bound, 0), or `-exp(A_log) * softplus(raw + dt_bias)`, below 0 without a bound.

    Raises:
        ValueError: a shape does not fit `raw`, or `lower_bound` is not negative.
    """
    heads, width = raw.shape[-2:]
    if A_log.shape != (heads,):
        raise ValueError(f"A_log has shape {tuple(A_log.shape)}, expected ({heads},) for raw {tuple(raw.shape)}")
    if dt_bias is not None and dt_bias.numel() != heads * width:
        raise ValueError(f"dt_bias has {dt_bias.numel()} elements, expected H*K = {heads * width}")
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"lower_bound is {lower_bound}, expected a negative number or None")
    dtype = compute_dtype(raw, A_log, dt_bias)
    rate = A_log.to(dtype).exp().unsqueeze(-1)
    drive = raw.to(dtype)
    if dt_bias is not None:
        drive = drive + dt_bias.to(dtype).view(heads, width)
    if lower_bound is None:
        return -rate * F.softplus(drive)
    return lower_bound * torch.sigmoid(rate * drive)


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dim, [..., K] any float dtype -> compute dtype.

    The eps under the root keeps value and gradient finite for an all-zero row (padding).
    """
    x = x.to(compute_dtype(x))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def kda_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """KDA token by token: the definition that every other form is measured against (plain autograd).

    Per head, with S [K, V]: S <- exp(g) * S (over K); S <- S + beta * k (v - S^T k)^T; o = scale * S^T q.

    Args:
        q, k: [B, T, H, K], already normalised.
        v: [B, T, H, V].
        g: [B, T, H, K], log decay.
        beta: [B, T, H].
        initial_state: [N, H, K, V] or None for zeros.
        scale: factor on the output, K**-0.5 by default.
        cu_seqlens: [N + 1] integer borders of packed sequences (B must be 1); the state restarts at each.

    Returns:
        o [B, T, H, V] in v's dtype, final state [N, H, K, V] in the compute dtype.

    Raises:
        ValueError: shapes that do not fit each other, or borders that do not rise from 0 to T.
    """
    check_inputs(q, k, v, g, beta, initial_state, cu_seqlens)
    dtype = compute_dtype(q, k, v, g, beta, initial_state)
    if cu_seqlens is not None:
        bounds = sequence_bounds(cu_seqlens, k.shape[1])
        parts = []
        for n, (start, stop) in enumerate(itertools.pairwise(bounds)):
            state = None if initial_state is None else initial_state[n : n + 1]
            span = slice(start, stop)
            parts.append(
                kda_recurrent(q[:, span], k[:, span], v[:, span], g[:, span], beta[:, span], state, scale=scale)
            )
        return torch.cat([out for out, _ in parts], dim=1), torch.cat([state for _, state in parts]).to(dtype)

    batch, length, heads, width = k.shape
    scale = width**-0.5 if scale is None else scale
    if initial_state is None:
        state = torch.zeros(batch, heads, width, v.shape[3], dtype=dtype, device=k.device)
    else:
        state = initial_state.to(dtype)
    if length == 0:
        return torch.zeros_like(v), state.clone()
    outputs = []
    # unbind, not x[:, t]: the backward of indexing allocates a full-size zero tensor per token.
    tokens = zip(*(x.to(dtype).unbind(1) for x in (q, k, v, g, beta)))
    with torch.autocast(k.device.type, enabled=False):
        for q_t, k_t, v_t, g_t, beta_t in tokens:
            state = state * g_t.exp().unsqueeze(-1)
            update = (v_t - torch.einsum("bhk,bhkv->bhv", k_t, state)) * beta_t.unsqueeze(-1)
            state = state + k_t.unsqueeze(-1) * update.unsqueeze(-2)
            outputs.append(torch.einsum("bhk,bhkv->bhv", q_t, state) * scale)
    return torch.stack(outputs, dim=1).to(v.dtype), state


@torch.no_grad()
def kda_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, *, scale: float | None = None
) -> Tensor:
    """One decode step of KDA; `state` is updated in place. No autograd; plain ops, so it can be traced.

    Args:
        q, k: [B, H, K], already normalised.
        v: [B, H, V].
        g: [B, H, K], log decay.
        beta: [B, H].
        state: [B, H, K, V] contiguous, float32 or float64. Everything is computed in its dtype.
        scale: factor on the output, K**-0.5 by default.

    Returns:
        o [B, H, V] in v's dtype.

    Raises:
        ValueError: `state` has another shape than [B, H, K, V], or is not contiguous.
    """
    batch, heads, width = k.shape
    if state.shape != (batch, heads, width, v.shape[-1]) or not state.is_contiguous():
        raise ValueError(
            f"state has shape {tuple(state.shape)} and strides {state.stride()}, "
            f"expected contiguous {(batch, heads, width, v.shape[-1])}"
        )
    scale = width**-0.5 if scale is None else scale
    if native.takes_kda_step(state):
        return native.kda_step(q, k, v, g, beta, state, scale).to(v.dtype)
    dtype, rows = state.dtype, batch * heads
    key, rate = k.to(dtype).reshape(rows, width, 1), beta.to(dtype).reshape(rows, 1, 1)
    parts = (
        state.view(rows, width, -1),
        g.to(dtype).exp().reshape(rows, width, 1),
        v.to(dtype).reshape(rows, 1, -1) * rate,
        (key * rate).view(rows, width),
        key,
        (q.to(dtype) * scale).reshape(rows, width),
    )
    plain = torch.compiler.is_compiling() or state.device.type != "cpu" or dtype != torch.float32
    with torch.autocast(state.device.type, enabled=False):
        if plain or state.nbytes < LOOKUP_BYTES:
            out = _step_block(None, *parts)
        else:
            size = max(1, STEP_CACHE // (state.stride(1) * state.itemsize))
            lines = torch.arange(min(rows, size) * width).view(-1, width)
            blocks = [parts] if rows <= size else zip(*(x.split(size) for x in parts))
            outputs = [_step_block(lines, *block) for block in blocks]
            out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return out.view(batch, heads, -1).to(v.dtype)


def _step_block(
    lines: Tensor | None,
    state: Tensor,
    decay: Tensor,
    value: Tensor,
    weighted_key: Tensor,
    key: Tensor,
    query: Tensor,
) -> Tensor:
    """`kda_step` for R states [R, K, V]; v and k weighted by beta; lines as in `_read`."""
    # Decaying first brings the state into the cache in order.
    state.mul_(decay)
    state.addcmul_(key, value - _read(state, weighted_key, lines))
    return _read(state, query, lines)


def _read(state: Tensor, weights: Tensor, lines: Tensor | None) -> Tensor:
    """Sum over K of weights [R, K] times state [R, K, V] -> [R, 1, V].

    Args:
        lines: [R or more, K], row numbers of the states laid end to end: the sum is then a weighted lookup, which
            on a CPU reads them at memory speed, half the time of a matrix product with one row. None: the product.
    """
    if lines is None:
        return torch.bmm(weights.unsqueeze(1), state)
    table = state.view(-1, state.shape[2])
    return F.embedding_bag(lines[: len(state)], table, mode="sum", per_sample_weights=weights).unsqueeze(1)
