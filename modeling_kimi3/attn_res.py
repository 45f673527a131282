"""Attention residuals: what a layer reads is a softmax mix over the outputs of earlier blocks (spec section 3).

Shapes: B batch, T time, D hidden size, S sources (finished blocks, embedding first, then the running sum).
"""

import torch
from torch import nn

from kimi3_kernels import attn_res_mix

from .mlp import KimiK3RMSNorm
from .precision import effective_weight, upcast

# The scoring norm's eps is fixed by the paper's code and is not `rms_norm_eps` (they happen to be equal in K3).
ATTN_RES_EPS = 1e-5


class ResidualQuery(nn.Linear):
    """The pseudo-query of one mix, `[1, D]`. Starts at zero, so that every mix starts as a plain average."""

    def __init__(self, hidden_size: int):
        super().__init__(hidden_size, 1, bias=False)


class ResidualNorm(KimiK3RMSNorm):
    """The norm weight `[D]` of one mix, whose norm is computed together with the scores.

    Calling it gives the weight: an offloaded module has it only while it is called.
    """

    def __init__(self, hidden_size: int):
        super().__init__(hidden_size, ATTN_RES_EPS)

    def forward(self) -> torch.Tensor:
        return self.weight


def score_weight(norm: ResidualNorm, query: nn.Module) -> torch.Tensor:
    """`[D]` float32: what one mix scores its normed sources with, from the modules that hold its parameters.

    Args:
        norm: the scoring norm.
        query: the linear module `[1, D]` with the pseudo-query, plain or adapted.
    """
    return upcast(norm()) * upcast(effective_weight(query).reshape(-1))


class AttentionResidualMix(nn.Module):
    """Mixes depth sources by a softmax over their scores against the pseudo-query, all in float32.

    Has no parameters: norm weight and pseudo-query keep their released places beside it. It is a module so that hooks
    can record its weights (`output_attn_res_weights`) or replace what it returns.
    """

    def forward(
        self,
        sources: list[torch.Tensor],
        weight: torch.Tensor,
        inv_rms: list[torch.Tensor | None] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            sources: S tensors `[B, T, D]`: finished blocks, oldest first, then the running sum.
            weight: `[D]`, see `score_weight`.
            inv_rms: per source `[B, T]` 1/rms where it is known already (finished blocks never change), else None.

        Returns:
            The mix `[B, T, D]` in the sources' dtype and the weights `[B, T, S]` in float32.
        """
        return attn_res_mix(sources, weight, ATTN_RES_EPS, inv_rms=inv_rms)
