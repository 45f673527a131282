"""The precision in which every operation of this package computes."""

import contextlib

import torch


def compute_dtype(*tensors: torch.Tensor | None) -> torch.dtype:
    """float64 where any tensor is float64, else float32 (spec section 5)."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


def no_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """Keeps autocast from taking products to half precision; free where autocast is off (a decode step counts it)."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()
