"""What one forward pass over a prompt shows about the mechanisms of a K3 model.

B batch, T time, H heads, K key dim.
"""

import math
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from .holdback import kda_modules, mix_modules

PROBE_TOKENS = 2048


@torch.inference_mode()
def mechanisms(model: PreTrainedModel, prompt: np.ndarray) -> dict[str, list[dict]]:
    """Runs the first tokens of a prompt and averages over them.

    Args:
        model: Any causal model; what it lacks is left out.
        prompt: Ids `[T]`; at most `PROBE_TOKENS` are used.

    Returns:
        `attn_res`: for each mix its name and mean weight of each source. `expert_load`: for each MoE layer the load of
        each expert over the mean load, by the router's choices. `kda_half_life`: for each KDA layer, for each of its
        channels, after how many tokens of mean decay half of the state is left.
    """
    found: dict[str, list[dict]] = {"attn_res": [], "expert_load": [], "kda_half_life": []}
    names = {module: name for name, module in model.named_modules()}
    handles = []
    for mix in mix_modules(model):
        handles.append(mix.register_forward_hook(_record_mix(found["attn_res"], names[mix])))
    for module in model.modules():
        if type(module).__name__ == "KimiK3Router":
            handles.append(module.register_forward_hook(_record_load(found["expert_load"], names[module])))
    for mixer in kda_modules(model):
        gate = getattr(mixer, "f_b_proj", None)
        if isinstance(gate, torch.nn.Module) and hasattr(mixer, "lower_bound"):
            handles.append(gate.register_forward_hook(_record_decay(found["kda_half_life"], mixer)))
    if not handles:
        return {}
    try:
        ids = torch.from_numpy(prompt[:PROBE_TOKENS].astype(np.int64))[None].to(model.device)
        model(input_ids=ids, use_cache=False, logits_to_keep=1)
    finally:
        for handle in handles:
            handle.remove()
    return {name: rows for name, rows in found.items() if rows}


def _layer(name: str) -> int:
    return next(int(part) for part in name.split(".") if part.isdigit())


def _record_mix(rows: list[dict], name: str) -> Any:
    label = name.removeprefix("model.").removesuffix("_mix").replace("layers.", "").replace("_res", "")

    def hook(module: Any, args: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        weights = output[1].float().mean(dim=(0, 1))
        rows.append({"mix": label, "weights": [round(w, 5) for w in weights.tolist()]})

    return hook


def _record_load(rows: list[dict], name: str) -> Any:
    def hook(module: Any, args: tuple, output: tuple) -> None:
        scores, chosen = output[0], next(part for part in output if not part.is_floating_point())
        counts = torch.bincount(chosen.flatten(), minlength=scores.shape[-1]).double()
        rows.append({"layer": _layer(name), "share": [round(c, 4) for c in (counts / counts.mean()).tolist()]})

    return hook


def _record_decay(rows: list[dict], mixer: Any) -> Any:
    """Means over all calls of a pass: a mixer may take a long input in several pieces."""
    from kimi3_kernels import kda_gate

    total: Any = 0.0
    count = 0
    row: dict[str, Any] = {"layer": mixer.layer_idx, "tokens": []}

    def hook(module: Any, args: tuple, output: torch.Tensor) -> None:
        nonlocal total, count
        raw = output.unflatten(-1, (mixer.A_log.shape[0], -1))
        total = total + kda_gate(raw, mixer.A_log, mixer.dt_bias, mixer.lower_bound).double().sum(dim=(0, 1))
        count += output.shape[0] * output.shape[1]
        half = math.log(2) / (-total / count).clamp_min(1e-9)
        row["tokens"] = [round(tokens, 4) for tokens in half.flatten().tolist()]
        if not any(known is row for known in rows):
            rows.append(row)

    return hook
