"""Parameters that keep their precision, and matmuls that autocast must leave alone (spec section 5).

`module.to(torch.bfloat16)` and `module.half()` reach every floating parameter of a module tree. The decay
parameters, the router's selection bias, the convolution taps and the gated norm's weight must not follow: rounding
them moves the logits by more than any kernel does.
"""

import torch
from torch import nn


class KeepPrecision(nn.Module):
    """Mixin: parameters and buffers that `.to` moves but never makes narrower than float32.

    Casting to a wider type (`.double()`) and back is let through, so that a whole model can run in float64. Children
    are treated as they themselves decide.
    """

    # Names among the module's own parameters and buffers; None protects all of them.
    _kept_tensors: tuple[str, ...] | None = None

    def _apply(self, fn, recurse=True):
        if recurse:
            for child in self.children():
                child._apply(fn)
        own = {**self._parameters, **self._buffers}
        names = own if self._kept_tensors is None else self._kept_tensors
        kept = [own[name] for name in names if own[name] is not None]

        def guarded(tensor: torch.Tensor) -> torch.Tensor:
            result = fn(tensor)
            protected = any(tensor is keep or tensor is keep.grad for keep in kept)
            floor = min(tensor.dtype, torch.float32, key=lambda dtype: dtype.itemsize)
            if protected and result.dtype.itemsize < floor.itemsize:
                return tensor.to(result.device, floor)
            return result

        return super()._apply(guarded, recurse=False)


def wide_dtype() -> torch.dtype:
    """What parameters of fixed precision are made in: float32, or the default dtype where that is wider."""
    return torch.promote_types(torch.get_default_dtype(), torch.float32)


def upcast(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in float32, or unchanged where it is float64 already."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def linear_upcast(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x @ weight.T` in float32 (float64 where either is), whatever autocast is active.

    Args:
        x: `[..., in]`, any floating dtype.
        weight: `[out, in]`, any floating dtype.
    """
    dtype = torch.float64 if torch.float64 in (x.dtype, weight.dtype) else torch.float32
    with torch.autocast(device_type=x.device.type, enabled=False):
        return nn.functional.linear(x.to(dtype), weight.to(dtype))


def effective_weight(linear: nn.Module) -> torch.Tensor:
    """The `[out, in]` matrix that a bias-free linear module applies at this moment.

    Absorbed attention and the residual mix need the matrix itself. Reading `module.weight` is right only for a plain
    `nn.Linear`: an adapter, a quantised layer or an offloaded one keeps something else there, so what the module
    does to the unit vectors is taken instead. Gradients flow to whatever the module trains.
    """
    # accelerate's hooks, which every module has once a model is spread over devices, keep the module's own forward.
    forward = vars(linear).get("_old_forward", linear.forward)
    if getattr(forward, "__func__", None) is nn.Linear.forward:
        weight = linear.weight
        if type(weight) in (torch.Tensor, nn.Parameter) and weight.device.type != "meta":
            return weight
    probe = next(linear.parameters())
    dtype = probe.dtype if probe.is_floating_point() else torch.get_default_dtype()
    device = getattr(getattr(linear, "_hf_hook", None), "execution_device", None) or probe.device
    eye = torch.eye(linear.in_features, dtype=dtype, device="cpu" if str(device) == "meta" else device)
    # What is read off must be no coarser than what is stored.
    with torch.autocast(device_type=eye.device.type, enabled=False):
        return linear(eye).transpose(0, 1)
