"""Runs a model with one of its memories held back, from outside: no weight and no line of the model changes.

Three mechanisms carry what a K3 model remembers. Holding one back shows what the others do without it:

- `softmax-window=W`: softmax layers see the last W tokens only; constant state must do the rest.
- `kda-reset=W`: KDA layers forget state and convolution tail at every W-th token; softmax must do the rest.
- `attn-res-newest`: attention residuals read the newest source only.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, and_masks, sdpa_mask, sliding_window_overlay

from .errors import Refusal

FULL = "full"
FORMS = "softmax-window=W, kda-reset=W or attn-res-newest"


@dataclass(frozen=True)
class Column:
    """One way to run the model.

    Attributes:
        name: As asked for, such as `softmax-window=512`; `full` holds nothing back.
        kind: `full`, `softmax-window`, `kda-reset` or `attn-res-newest`.
        window: W where the kind has one.
    """

    name: str
    kind: str
    window: int = 0


def column(text: str) -> Column:
    """Reads a column's name.

    Raises:
        Refusal: it is none of the known forms.
    """
    kind, _, size = text.partition("=")
    if kind in ("softmax-window", "kda-reset") and size.isdigit() and int(size) > 0:
        return Column(text, kind, int(size))
    if text in (FULL, "attn-res-newest"):
        return Column(text, text)
    raise Refusal(f"--hold-back {text} must be {FORMS}, with a positive number of tokens W.")


def kda_modules(model: nn.Module) -> list[nn.Module]:
    """The KDA mixers of a model: they know their layer and hold `A_log`, transformers' own one level down."""

    def decays(module: nn.Module) -> bool:
        return "A_log" in module._parameters

    return [
        module
        for module in model.modules()
        if hasattr(module, "layer_idx")
        and (decays(module) or any(decays(child) and not hasattr(child, "layer_idx") for child in module.children()))
    ]


def mix_modules(model: nn.Module) -> list[nn.Module]:
    """The attention-residual mixes of a model."""
    return [module for module in model.modules() if type(module).__name__ == "AttentionResidualMix"]


def check_columns(columns: list[Column], config: Any) -> None:
    """Refuses columns that a model of this config cannot have.

    Raises:
        Refusal: the model lacks the mechanism.
    """
    kinds = getattr(config, "layer_types", None) or []
    for item in columns:
        lacks = {
            "kda-reset": "linear_attention" not in kinds,
            "softmax-window": bool(kinds) and not any("attention" in k and k != "linear_attention" for k in kinds),
            "attn-res-newest": getattr(config, "attn_res_block_size", None) is None,
        }.get(item.kind, False)
        if lacks:
            raise Refusal(
                f"--hold-back {item.name}: this model has no such mechanism, so there is nothing to hold back."
            )


class Holding:
    """What the model class must heed while a memory is held back.

    Attributes:
        chunk: Prompts are fed in chunks of this size; None for any.
        single: Whether each prompt must run alone.
    """

    def __init__(self, chunk: int | None = None, single: bool = False) -> None:
        self.chunk = chunk
        self.single = single
        self._seen: dict[int, int] = {}

    def new_sequence(self) -> None:
        """To be called before each prompt."""
        self._seen.clear()

    def advance(self, layer: int, tokens: int) -> int:
        """Counts `tokens` more for a layer; returns how many it had before."""
        before = self._seen.get(layer, 0)
        self._seen[layer] = before + tokens
        return before


@contextmanager
def hold_back(model: PreTrainedModel, item: Column) -> Iterator[Holding]:
    """Holds one mechanism of a model back for the time of a `with` block, and undoes it whatever happens there."""
    if item.kind == "softmax-window":
        with _window(model, item.window):
            yield Holding()
    elif item.kind == "kda-reset":
        holding = Holding(chunk=item.window, single=True)
        with _hooks(
            kda_modules(model),
            lambda module: module.register_forward_pre_hook(_forget(holding, item.window), with_kwargs=True),
        ):
            yield holding
    elif item.kind == "attn-res-newest":
        with _hooks(mix_modules(model), lambda module: module.register_forward_hook(_newest)):
            yield Holding()
    else:
        yield Holding()


@contextmanager
def _hooks(modules: list[nn.Module], register: Callable[[nn.Module], Any]) -> Iterator[None]:
    handles = [register(module) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _window(model: PreTrainedModel, window: int) -> Iterator[None]:
    """An attention implementation of its own whose mask hides all but the last `window` tokens, in every step."""
    name = f"kimi3_eval_window_{window}"

    def mask(**kwargs: Any) -> torch.Tensor | None:
        kwargs["allow_is_causal_skip"] = False
        kwargs["mask_function"] = and_masks(kwargs["mask_function"], sliding_window_overlay(window))
        return sdpa_mask(**kwargs)

    AttentionInterface.register(name, sdpa_attention_forward)
    AttentionMaskInterface.register(name, mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _forget(holding: Holding, window: int) -> Callable:
    """A hook before a KDA mixer that zeroes its state and tail where a new stretch of `window` tokens begins."""

    def hook(module: Any, args: tuple, kwargs: dict) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        if hidden.shape[0] != 1:
            raise ValueError(f"kda-reset runs prompts one by one, but the batch has {hidden.shape[0]} rows")
        before = holding.advance(module.layer_idx, hidden.shape[1])
        if before % window + hidden.shape[1] > window:
            raise ValueError(f"kda-reset={window}: feed prompts in chunks of {window} tokens, got {hidden.shape[1]}")
        if before and before % window == 0:
            cache: Any = kwargs.get("cache", kwargs.get("past_key_values"))
            layer = cache.layers[module.layer_idx]
            for held in (layer.conv_states, layer.recurrent_states):
                for state in held.values() if isinstance(held, dict) else held:
                    if state is not None:
                        state.zero_()

    return hook


def _newest(module: nn.Module, args: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> tuple:
    """A hook after a mix that returns the last of its sources and a weight of one for it."""
    sources = args[0]
    weights = torch.zeros_like(output[1])
    weights[..., -1] = 1
    return sources[-1], weights
