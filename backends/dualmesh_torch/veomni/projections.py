"""Projections around Ulysses attention by VeOmni's names, over the exchanges in `functions`.

Two modules of VeOmni have the same names with other meanings: here the functions of `async_ulysses`, whose heads are a
dim of their own and normalized after the exchange, and, with `_dit`, those of `async_ulysses_dit`, which normalize the
whole hidden dim before it. Both have VeOmni's numbers and gradients without its overlap of exchanges and products.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from dualmesh.errors import ArgumentError
from dualmesh_torch.veomni.functions import (
    all_to_all_tensor,
    gather_heads_scatter_seq,
    gather_seq_scatter_heads,
    padding_tensor_for_seqeunce_parallel,
    unpadding_tensor_for_seqeunce_parallel,
)
from dualmesh_torch.veomni.groups import Group

_Tensor = torch.Tensor | None
_NORMS: dict[str, Callable[..., torch.Tensor]] = {
    "rmsnorm": lambda x, shape, weight, bias, eps: functional.rms_norm(x, shape, weight, eps),
    "layernorm": lambda x, shape, weight, bias, eps: functional.layer_norm(x, shape, weight, bias, eps or 1e-5),
}


def async_ulysses_qkv_projection(
    hidden_states: _Tensor = None,
    seq_dimension: int | None = None,
    head_dimension: int | None = None,
    q_weight: _Tensor = None,
    q_bias: _Tensor = None,
    k_weight: _Tensor = None,
    k_bias: _Tensor = None,
    v_weight: _Tensor = None,
    v_bias: _Tensor = None,
    norm_type: str | None = None,
    norm_q_weight: _Tensor = None,
    norm_q_bias: _Tensor = None,
    norm_k_weight: _Tensor = None,
    norm_k_bias: _Tensor = None,
    normalized_shape: int | Sequence[int] | None = None,
    eps: float | None = None,
    unpadded_dim_size: int | None = None,
    head_dim: int | None = None,
    group: Group = None,
) -> tuple[torch.Tensor, ...]:
    """Return query, key and value with whole sequences and split heads, query and key normalized. *Collective.*

    Query, key and value are (batch, whole sequence, heads / size, head_dim); each head is normalized, after the
    exchange. Fewer key/value heads than ranks are repeated.

    Raises:
        ArgumentError: A `norm_type` other than None, "rmsnorm" and "layernorm"; arguments that are missing.
    """
    where = "async_ulysses_qkv_projection"
    _check_norm(where, norm_type)
    x, seq, heads_at, width, q_weight, k_weight, v_weight = _require(
        where,
        hidden_states=hidden_states,
        seq_dimension=seq_dimension,
        head_dimension=head_dimension,
        head_dim=head_dim,
        q_weight=q_weight,
        k_weight=k_weight,
        v_weight=v_weight,
    )
    pairs = ((q_weight, q_bias), (k_weight, k_bias), (v_weight, v_bias))
    heads = [functional.linear(x, *pair).reshape(*x.shape[:-1], -1, width) for pair in pairs]
    q, k, v = (gather_seq_scatter_heads(one, seq, heads_at, unpadded_dim_size or 0, group) for one in heads)
    shape = (width,) if normalized_shape is None else normalized_shape
    q = _normalize(q, norm_type, shape, norm_q_weight, norm_q_bias, eps)
    k = _normalize(k, norm_type, shape, norm_k_weight, norm_k_bias, eps)
    return q, k, v


def async_ulysses_output_projection(
    hidden_states: _Tensor = None,
    seq_dimension: int | None = None,
    head_dimension: int | None = None,
    proj_weight: _Tensor = None,
    proj_bias: _Tensor = None,
    unpadded_dim_size: int | None = None,
    group: Group = None,
) -> torch.Tensor:
    """Return the projection of what attention returned, a block of the sequence. *Collective.*

    `hidden_states` is (batch, whole sequence, heads / size, head_dim); `unpadded_dim_size` is known from its shape.

    Raises:
        ArgumentError: Arguments that are missing.
    """
    x, seq, heads_at, weight = _require(
        "async_ulysses_output_projection",
        hidden_states=hidden_states,
        seq_dimension=seq_dimension,
        head_dimension=head_dimension,
        proj_weight=proj_weight,
    )
    traded = gather_heads_scatter_seq(x, heads_at, seq, group)
    return functional.linear(traded.flatten(-2), weight, proj_bias)


def async_ulysses_qkv_projection_dit(
    hidden_states: _Tensor = None,
    seq_dimension: int | None = None,
    head_dimension: int | None = None,
    q_weight: _Tensor = None,
    q_bias: _Tensor = None,
    k_weight: _Tensor = None,
    k_bias: _Tensor = None,
    v_weight: _Tensor = None,
    v_bias: _Tensor = None,
    norm_type: str | None = None,
    norm_q_weight: _Tensor = None,
    norm_q_bias: _Tensor = None,
    norm_k_weight: _Tensor = None,
    norm_k_bias: _Tensor = None,
    normalized_shape: int | Sequence[int] | None = None,
    eps: float | None = None,
    unpadded_dim_size: int | None = None,
    head_dim: int | None = None,
    group: Group = None,
) -> tuple[torch.Tensor, ...]:
    """Return query, key and value with whole sequences and a split hidden dim. *Collective.*

    Query, key and value are (..., whole sequence, hidden / size); query and key are normalized over the whole hidden
    dim, before the exchange. `head_dim` says nothing here, as in VeOmni.

    Raises:
        ArgumentError: A `norm_type` other than None, "rmsnorm" and "layernorm"; arguments that are missing.
    """
    where = "async_ulysses_dit.async_ulysses_qkv_projection"
    _check_norm(where, norm_type)
    x, seq, hidden_at, q_weight, k_weight, v_weight = _require(
        where,
        hidden_states=hidden_states,
        seq_dimension=seq_dimension,
        head_dimension=head_dimension,
        q_weight=q_weight,
        k_weight=k_weight,
        v_weight=v_weight,
    )
    pairs = ((q_weight, q_bias), (k_weight, k_bias), (v_weight, v_bias))
    q, k, v = (functional.linear(x, *pair) for pair in pairs)
    shape = q.shape[-1:] if normalized_shape is None else normalized_shape
    q = _normalize(q, norm_type, shape, norm_q_weight, norm_q_bias, eps)
    k = _normalize(k, norm_type, shape, norm_k_weight, norm_k_bias, eps)
    traded = (all_to_all_tensor(one, hidden_at, seq, group) for one in (q, k, v))
    length = unpadded_dim_size or 0
    return tuple(unpadding_tensor_for_seqeunce_parallel(one, seq, length, group) for one in traded)


def async_ulysses_output_projection_dit(
    hidden_states: _Tensor = None,
    seq_dimension: int | None = None,
    head_dimension: int | None = None,
    proj_weight: _Tensor = None,
    proj_bias: _Tensor = None,
    unpadded_dim_size: int | None = None,
    group: Group = None,
) -> torch.Tensor:
    """Return the projection of what attention returned, a block of the sequence. *Collective.*

    `hidden_states` is (..., whole sequence, hidden / size); `unpadded_dim_size` is known from its shape.

    Raises:
        ArgumentError: Arguments that are missing.
    """
    x, seq, hidden_at, weight = _require(
        "async_ulysses_dit.async_ulysses_output_projection",
        hidden_states=hidden_states,
        seq_dimension=seq_dimension,
        head_dimension=head_dimension,
        proj_weight=proj_weight,
    )
    padded = padding_tensor_for_seqeunce_parallel(x, seq, group)
    return functional.linear(all_to_all_tensor(padded, seq, hidden_at, group), weight, proj_bias)


def divide_qkv_linear_weight(weight: torch.Tensor, dim: int) -> tuple[torch.Tensor, ...]:
    """Cut a fused projection into query, key and value. *Pure.*"""
    return weight.chunk(3, dim=dim)


def divide_qkv_linear_bias(bias: torch.Tensor | None, dim: int) -> tuple[torch.Tensor | None, ...]:
    """Cut a fused bias into query, key and value; three Nones where there is none. *Pure.*"""
    return (None, None, None) if bias is None else bias.chunk(3, dim=dim)


def _normalize(
    x: torch.Tensor, kind: str | None, shape: int | Sequence[int], weight: _Tensor, bias: _Tensor, eps: float | None
) -> torch.Tensor:
    return (
        x if kind is None else _NORMS[kind](x, (shape,) if isinstance(shape, int) else tuple(shape), weight, bias, eps)
    )


def _check_norm(where: str, norm_type: str | None) -> None:
    if norm_type is not None and norm_type not in _NORMS:
        raise ArgumentError(f"{where}: norm_type={norm_type!r}. Give None or one of {list(_NORMS)}.")


def _require(where: str, **given: Any) -> tuple[Any, ...]:
    """Return arguments that VeOmni's signature leaves optional and its code does not."""
    missing = [name for name, value in given.items() if value is None]
    if missing:
        raise ArgumentError(f"{where}: {', '.join(missing)} left out. Needed: {', '.join(given)}.", missing=missing)
    return tuple(given.values())
