"""RMSNorm, the gated linear unit (SiTU or SiLU) and the dense MLP (spec sections 3 and 4).

Shapes: B batch, T time, D hidden size, I intermediate size.
"""

import torch
from torch import nn

from kimi3_kernels import rms_norm, situ

from .configuration_kimi3 import KimiK3Config


class KimiK3RMSNorm(nn.Module):
    """x * rsqrt(mean(x^2) + eps) * weight, statistics and product in float32 (spec section 3)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


def gated_unit(gate: torch.Tensor, up: torch.Tensor, config: KimiK3Config) -> torch.Tensor:
    """The activation between an MLP's up and down projections, on `gate` and `up` of one shape `[..., I]`.

    `hidden_act` "situ" is SiTU-GLU in float32 (spec section 4), "silu" the SwiGLU of Kimi-Linear.
    """
    if config.hidden_act == "situ":
        return situ(gate, up, config.activation_situ_beta, config.activation_situ_linear_beta)
    return nn.functional.silu(gate) * up


class KimiK3MLP(nn.Module):
    """Dense gated MLP, `[..., D]` to `[..., D]`; also the shared experts, which are one MLP of their joint width."""

    def __init__(self, config: KimiK3Config, intermediate_size: int | None = None):
        super().__init__()
        self.config = config
        self.intermediate_size = config.intermediate_size if intermediate_size is None else intermediate_size
        self.gate_proj = nn.Linear(config.hidden_size, self.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(gated_unit(self.gate_proj(hidden_states), self.up_proj(hidden_states), self.config))
