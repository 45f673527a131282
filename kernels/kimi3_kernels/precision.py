"""The dtype in which every operation of this package computes."""

import torch


def compute_dtype(*tensors: torch.Tensor | None) -> torch.dtype:
    """float64 where any tensor is float64, else float32 (spec section 5)."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32
