"""`KimiK3Config`: one flat configuration for the K3 family, its defaults the released K3 (spec section 1)."""

import copy
from dataclasses import fields
from typing import Any, ClassVar

from transformers import AutoConfig
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
from transformers.utils import logging

from .config_quantization import QUANTIZATION_METHOD, rewrite_quantization
from .config_release import ABSENT_MOE, ALIASES, has_k3_keys, is_release_dict, read_release, write_release
from .config_validation import refuse_unimplemented, validate_config
from .presets import PRESETS, default_linear_attn_config

__all__ = ["QUANTIZATION_METHOD", "KimiK3Config", "register_configs"]

logger = logging.get_logger(__name__)

LINEAR_ATTN_PROPERTIES = (
    "layer_types",
    "kda_layers",
    "full_attn_layers",
    "kda_num_heads",
    "kda_head_dim",
    "conv_kernel_size",
    "gate_lower_bound",
    "use_full_rank_gate",
)
# Computed from other fields; given nevertheless, they have to agree.
DERIVED_PROPERTIES = ("qk_head_dim", "expert_hidden_size")


def _linear_attn_property(key: str, doc: str) -> Any:
    def get(self: "KimiK3Config") -> Any:
        return self.linear_attn_config.get(key)

    def set_(self: "KimiK3Config", value: Any) -> None:
        self.linear_attn_config = {**self.linear_attn_config, key: value}

    return property(get, set_, doc=doc)


class KimiK3Config(PreTrainedConfig):
    """Configuration of a Kimi K3 text model.

    Field names are the released ones. `KimiK3Config()` is the released K3; a field that is not given keeps that value,
    except that ids beyond `vocab_size` become None, that a model without experts takes no expert settings, and that
    `linear_attn_config` is laid out for `num_hidden_layers` (softmax at every fourth layer and at the last).

    A released `config.json` (composite, or flat `kimi_linear`) is read by its own rule: a missing key means that the
    mechanism is absent. Such a file is kept in `release_config`, and `to_release_dict()` writes it back. What this
    class itself saves names every field.

    The class is not decorated `@strict` as transformers' configs are: those checks raise errors that are no ValueError.
    `validate()` runs whenever a config is made, read or saved, and when a model is built from it.

    A field whose type does not allow None may be None all the same where nothing reads it: sizes of MLA in a model of
    KDA layers only, expert settings in a dense model.

    Args:
        hidden_act: "situ" or "silu".
        activation_situ_linear_beta: None lets SiTU's up branch enter as it is.
        num_experts: None for a dense model.
        num_shared_experts: their number; together they are one MLP of `num_shared_experts * moe_intermediate_size`.
        routed_expert_hidden_size: latent width of the routed experts, None for full width.
        first_k_dense_replace: leading layers with a dense feed-forward.
        moe_layer_freq: of the other layers, those whose 0-based index it divides have experts.
        attn_res_block_size: layers per attention-residual block, None for plain residuals.
        q_lora_rank: rank of the query compression, None for none.
        linear_attn_config: dict with `kda_layers` and `full_attn_layers` (1-based lists, the only truth about which
            layer is which), `num_heads`, `head_dim`, `short_conv_kernel_size`, `gate_lower_bound` (None or missing:
            softplus gate) and `use_full_rank_gate` (missing: low rank). Its entries are also properties here.
        release_config: the released file this config was read from.
    """

    model_type = "kimi_k3"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache"]
    attribute_map = ALIASES
    # What a directory that names no tokenizer class is loaded with.
    tokenizer_class: ClassVar[str] = "KimiK3Tokenizer"

    vocab_size: int = 163840
    hidden_size: int = 7168
    intermediate_size: int = 33792
    num_hidden_layers: int = 93
    num_attention_heads: int = 96
    num_key_value_heads: int = None  # type: ignore[assignment]
    hidden_act: str = "situ"
    activation_situ_beta: float = 4.0
    activation_situ_linear_beta: float | None = 25.0
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 1048576
    bos_token_id: int | None = 163584
    eos_token_id: int | list[int] | None = 163586
    pad_token_id: int | None = 163839
    num_experts: int | None = 896
    num_experts_per_token: int = 16
    num_shared_experts: int = 2
    moe_intermediate_size: int = 3072
    routed_expert_hidden_size: int | None = 3584
    latent_moe_use_norm: bool = True
    moe_renormalize: bool = True
    moe_router_activation_func: str = "sigmoid"
    topk_method: str | None = "noaux_tc"
    routed_scaling_factor: float = 1.0
    use_grouped_topk: bool = True
    num_expert_group: int = 1
    topk_group: int = 1
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    attn_res_block_size: int | None = 12
    q_lora_rank: int | None = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    mla_use_nope: bool = True
    mla_use_output_gate: bool = True
    num_nextn_predict_layers: int = 0
    attention_dropout: float = 0.0
    # Laid out for the number of layers where it is not given; never None in a finished object.
    linear_attn_config: dict[str, Any] = None  # type: ignore[assignment]
    release_config: dict[str, Any] | None = None

    kda_layers = _linear_attn_property("kda_layers", "1-based numbers of the KDA layers.")
    full_attn_layers = _linear_attn_property("full_attn_layers", "1-based numbers of the softmax (MLA) layers.")
    kda_num_heads = _linear_attn_property("num_heads", "KDA heads; need not equal `num_attention_heads`.")
    kda_head_dim = _linear_attn_property("head_dim", "Width of a KDA head: of its keys and of its values.")
    conv_kernel_size = _linear_attn_property("short_conv_kernel_size", "Taps of the short convolutions.")
    gate_lower_bound = _linear_attn_property("gate_lower_bound", "Bound of the log decay; None for softplus.")
    use_full_rank_gate = _linear_attn_property("use_full_rank_gate", "KDA output gate: `g_proj`, else `g_a`, `g_b`.")

    def __init__(self, **kwargs: Any):
        if is_release_dict(kwargs):
            kwargs = read_release(kwargs)
        kwargs = {ALIASES.get(key, key): copy.deepcopy(value) for key, value in kwargs.items()}
        # Saved by another version or read from the file's frame: neither describes this object.
        kwargs.pop("model_type", None)
        kwargs.pop("transformers_version", None)
        defaults: dict[str, Any] = {field.name: field.default for field in fields(type(self))}
        if "num_experts" in kwargs and kwargs["num_experts"] is None:
            defaults.update(ABSENT_MOE)
        vocab_size = kwargs.get("vocab_size", self.vocab_size)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if isinstance(vocab_size, int) and defaults[name] >= vocab_size:
                defaults[name] = None
        values = {**defaults, **kwargs}
        # The base class sets its own fields only and would hand ours to __post_init__, too late to be checked there.
        for name in defaults.keys() - {field.name for field in fields(PreTrainedConfig)}:
            setattr(self, name, values.pop(name))
        super().__init__(**values)

    def __post_init__(self, **kwargs: Any) -> None:
        refuse_unimplemented({**vars(self), **kwargs})
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.linear_attn_config is None:
            self.linear_attn_config = default_linear_attn_config(self.num_hidden_layers, 96, 128)
        for name in LINEAR_ATTN_PROPERTIES:
            if name in kwargs and isinstance(self.linear_attn_config, dict):
                setattr(self, name, kwargs.pop(name))
        quantization = kwargs.pop("quantization_config", None)
        if quantization is not None:
            self.quantization_config = rewrite_quantization(quantization)
        validate_config(self)
        for name in DERIVED_PROPERTIES:
            derived = getattr(self, name)
            if (given := kwargs.pop(name, derived)) != derived:
                raise ValueError(f"{name} is {given!r}: expected {derived!r}, which the other fields give.")
        super().__post_init__(**kwargs)

    @property
    def layer_types(self) -> list[str]:
        """Per layer "linear_attention" (KDA) or "full_attention" (MLA), transformers' words for the two lists."""
        kda = set(self.kda_layers)
        return ["linear_attention" if i + 1 in kda else "full_attention" for i in range(self.num_hidden_layers)]

    @layer_types.setter
    def layer_types(self, kinds: list[str]) -> None:
        if not isinstance(kinds, list | tuple):
            raise ValueError(f"layer_types is {kinds!r}: expected a list with one entry per layer.")
        unknown = sorted({str(kind) for kind in kinds} - {"linear_attention", "full_attention"})
        if unknown:
            raise ValueError(f"layer_types has {unknown}: expected 'linear_attention' or 'full_attention'.")
        self.linear_attn_config = {
            **self.linear_attn_config,
            "kda_layers": [i + 1 for i, kind in enumerate(kinds) if kind == "linear_attention"],
            "full_attn_layers": [i + 1 for i, kind in enumerate(kinds) if kind == "full_attention"],
        }

    @property
    def qk_head_dim(self) -> int:
        """Width of an MLA query or key; 0 where the config has no MLA."""
        if self.qk_nope_head_dim is None or self.qk_rope_head_dim is None:
            return 0
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def expert_hidden_size(self) -> int:
        """Width in which the routed experts work: the latent's, or the model's."""
        return self.hidden_size if self.routed_expert_hidden_size is None else self.routed_expert_hidden_size

    def is_kda_layer(self, layer_idx: int) -> bool:
        """Is layer `layer_idx` (0-based) a KDA layer?"""
        return layer_idx + 1 in self.kda_layers

    def is_moe_layer(self, layer_idx: int) -> bool:
        """Has layer `layer_idx` (0-based) experts (spec section 1)?"""
        return (
            self.num_experts is not None
            and layer_idx >= self.first_k_dense_replace
            and layer_idx % self.moe_layer_freq == 0
        )

    @property
    def release_layout(self) -> str:
        """The released layout this config came from: "composite", "flat" (K3 keys) or "kimi_linear" (none of them).

        "composite" for a config that came from no file.
        """
        if self.release_config is None or "text_config" in self.release_config:
            return "composite"
        return "flat" if has_k3_keys(vars(self)) else "kimi_linear"

    def to_release_dict(self) -> dict[str, Any]:
        """This config as a released `config.json`.

        The file it was read from, unchanged where nothing has changed since; the composite form where it came from
        none. Tensor names in the layout of the same name: see `release_layout`.
        """
        return write_release(self)

    def validate(self) -> None:
        """Checks all fields, also those set after construction.

        Raises:
            ValueError: with the field's name, its value and what is expected.
        """
        refuse_unimplemented(vars(self))
        rewrite_quantization(getattr(self, "quantization_config", None))
        validate_config(self)
        super().validate()  # type: ignore[misc]

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> "KimiK3Config":
        """A small model with every mechanism of the family.

        Args:
            name: one of `PRESETS`.
            **overrides: fields to set differently.

        Raises:
            ValueError: the name is unknown, or the overrides contradict the preset.
        """
        if name not in PRESETS:
            raise ValueError(f"preset is {name!r}: expected one of {', '.join(PRESETS)}.")
        return cls(**{**PRESETS[name], **overrides})

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> tuple[dict, dict]:
        # `from_pretrained` would take a text_config for the whole, and warn about the model type of a flat file.
        raw, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        if is_release_dict(raw):
            raw = {**read_release(raw), "model_type": cls.model_type}
        return raw, kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers; keyword arguments that name fields are set together with the dict's, then validated."""
        values = read_release(config_dict) if is_release_dict(config_dict) else dict(config_dict)
        names = {field.name for field in fields(cls)} | set(LINEAR_ATTN_PROPERTIES)
        if kwargs.get("dtype") == "auto":
            # What the file says; transformers would keep the word itself.
            del kwargs["dtype"]
        for key in list(kwargs):
            if ALIASES.get(key, key) in names:
                values[ALIASES.get(key, key)] = kwargs.pop(key)
        result = super().from_dict(values, **kwargs)
        (result[0] if isinstance(result, tuple) else result).validate()
        return result

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KimiK3Config):
            return False
        return self._comparable() == other._comparable()

    def _comparable(self) -> dict[str, Any]:
        return {key: value for key, value in self.to_dict().items() if key not in ("_name_or_path", "architectures")}


class KimiLinearOrK3Config(KimiLinearConfig):
    """Stands for `model_type` kimi_linear: gives a `KimiK3Config` where K3 keys ask for it, else transformers' own.

    transformers' KimiLinearConfig keeps keys that it does not know and builds a model without them, so a small K3 model
    would lose its attention residuals without a word. No object of this class itself ever exists.
    """

    def __new__(cls, **kwargs: Any) -> Any:
        if has_k3_keys(kwargs):
            return KimiK3Config(**{**kwargs, "model_type": cls.model_type})
        return KimiLinearConfig(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        chosen = KimiK3Config if has_k3_keys(config_dict) else KimiLinearConfig
        return chosen.from_dict(config_dict, **kwargs)


def register_configs() -> None:
    """Makes `AutoConfig` read `kimi_k3` and, with K3 keys, `kimi_linear`; a second call changes nothing."""
    if KimiK3Config.model_type in CONFIG_MAPPING_NAMES:
        logger.warning_once(
            "transformers has its own kimi_k3 by now. After this import the Auto classes use modeling_kimi3's instead."
        )
    AutoConfig.register(KimiK3Config.model_type, KimiK3Config, exist_ok=True)
    AutoConfig.register(KimiLinearConfig.model_type, KimiLinearOrK3Config, exist_ok=True)
