"""The K3 decoder: wiring of mixers, feed-forwards and residuals, and the causal language model on top.

Each mechanism is in the file named after it: `attention_kda.py`, `attention_mla.py`, `moe.py`, `mlp.py`,
`attn_res.py`, `cache.py`. Shapes: B batch, T time, D hidden size, H heads, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.generation import GenerationConfig, GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from kimi3_kernels import inv_rms

from .attention_kda import KimiDeltaAttention, KimiK3GatedRMSNorm, KimiK3ShortConvolution
from .attention_mla import KimiMLAttention
from .attn_res import ATTN_RES_EPS, AttentionResidualMix, ResidualNorm, ResidualQuery, score_weight
from .cache import KimiK3Cache
from .cache_quantized import quantized_cache
from .checkpoint import CheckpointMixin
from .configuration_kimi3 import KimiK3Config
from .masks import build_masks
from .mlp import KimiK3MLP, KimiK3RMSNorm
from .moe import KimiK3Experts, KimiK3Router, KimiK3SparseMoeBlock
from .sequence_layout import SequenceLayout


@dataclass
class KimiK3ModelOutput(MoeModelOutputWithPast):
    """Adds `attn_res_weights`: per mix, in the order computed, the weights `[B, T, sources]` in float32.

    Layer 0 has one mix (before its feed-forward), every later layer two (before mixer and feed-forward), and one
    more stands before the final norm. Sources: finished blocks, embedding first, then the running sum.
    """

    attn_res_weights: tuple[torch.Tensor, ...] | None = None


@dataclass
class KimiK3CausalLMOutput(MoeCausalLMOutputWithPast):
    """Adds `attn_res_weights`, see `KimiK3ModelOutput`."""

    attn_res_weights: tuple[torch.Tensor, ...] | None = None


class KimiK3DecoderLayer(GradientCheckpointingLayer):
    """One decoder layer with attention residuals, or with plain ones where `attn_res_block_size` is None."""

    def __init__(self, config: KimiK3Config, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.layer_type = config.layer_types[layer_idx]
        mixer = KimiDeltaAttention if self.layer_type == "linear_attention" else KimiMLAttention
        self.self_attn = mixer(config, layer_idx)
        self.is_moe = config.is_moe_layer(layer_idx)
        if self.is_moe:
            self.block_sparse_moe = KimiK3SparseMoeBlock(config)
        else:
            self.mlp = KimiK3MLP(config)
        self.input_layernorm = KimiK3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = KimiK3RMSNorm(config.hidden_size, config.rms_norm_eps)

        self.has_attn_res = config.attn_res_block_size is not None
        self.starts_block = self.has_attn_res and layer_idx % config.attn_res_block_size == 0
        if self.has_attn_res:
            self.self_attention_res_norm = ResidualNorm(config.hidden_size)
            self.self_attention_res_proj = ResidualQuery(config.hidden_size)
            self.mlp_res_norm = ResidualNorm(config.hidden_size)
            self.mlp_res_proj = ResidualQuery(config.hidden_size)
            self.self_attention_res_mix = AttentionResidualMix()
            self.mlp_res_mix = AttentionResidualMix()

    def forward(
        self,
        hidden_states: torch.Tensor,
        *blocks: torch.Tensor,
        block_inv_rms: tuple[torch.Tensor, ...] = (),
        attention_mask: torch.Tensor | None = None,
        layout: SequenceLayout | None = None,
        cache: Cache | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """
        Args:
            hidden_states: `[B, T, D]`, the running sum p (the residual stream where residuals are plain).
            blocks: the finished blocks' outputs, each `[B, T, D]`, oldest first. Positional, one argument each, so
                that reentrant gradient checkpointing sees them as inputs.
            block_inv_rms: 1/rms `[B, T]` of each block.
            attention_mask: for a softmax layer, the mask its attention implementation takes.
            layout: for a KDA layer, where the real tokens are.

        Returns:
            The running sum after this layer, `[B, T, D]`.
        """
        if not self.has_attn_res:
            residual = hidden_states
            hidden_states = residual + self._attend(hidden_states, attention_mask, layout, cache, **kwargs)
            return hidden_states + self._feed_forward(hidden_states)

        running, inv_rms_known = hidden_states, block_inv_rms
        mixed = running
        if blocks:
            weight = score_weight(self.self_attention_res_norm, self.self_attention_res_proj)
            mixed, _ = self.self_attention_res_mix([*blocks, running], weight, [*inv_rms_known, None])
        attended = self._attend(mixed, attention_mask, layout, cache, **kwargs)
        if self.starts_block:
            # The running sum becomes a source of its own; what this layer adds starts the next one.
            blocks, inv_rms_known = (*blocks, running), (*inv_rms_known, None)
            # Under autocast a mixer gives half precision; the stream stays as it came, as addition keeps it elsewhere.
            running = attended.to(running.dtype)
        else:
            running = running + attended
        weight = score_weight(self.mlp_res_norm, self.mlp_res_proj)
        mixed, _ = self.mlp_res_mix([*blocks, running], weight, [*inv_rms_known, None])
        return running + self._feed_forward(mixed)

    def _attend(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        layout: SequenceLayout | None,
        cache: Cache | None,
        **kwargs,
    ) -> torch.Tensor:
        normed = self.input_layernorm(hidden_states)
        if self.layer_type == "linear_attention":
            return self.self_attn(normed, layout=layout, cache=cache)
        return self.self_attn(normed, attention_mask=attention_mask, cache=cache, **kwargs)[0]

    def _feed_forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        normed = self.post_attention_layernorm(hidden_states)
        return self.block_sparse_moe(normed) if self.is_moe else self.mlp(normed)


class KimiK3PreTrainedModel(CheckpointMixin, PreTrainedModel):
    """What all K3 models share: initialisation, recorded outputs, loading and saving."""

    config: KimiK3Config
    config_class = KimiK3Config
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["KimiK3DecoderLayer"]
    _skip_keys_device_placement = ["cache"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _keep_in_fp32_modules_strict = ["A_log", "dt_bias", "e_score_correction_bias", "conv1d", "o_norm"]
    # The text model of a composite checkpoint: its vision tower and projector are left alone knowingly.
    _keys_to_ignore_on_load_unexpected = [r"^vision_tower\.", r"^mm_projector\."]
    _can_record_outputs = {
        "hidden_states": KimiK3DecoderLayer,
        "attentions": OutputRecorder(KimiMLAttention, index=1),
        "router_logits": OutputRecorder(KimiK3Router, index=0),
        "attn_res_weights": OutputRecorder(AttentionResidualMix, index=1),
    }

    # transformers reads these two off the source of this very file; mixers and experts live in files of their own.
    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True

    def __init__(self, config: KimiK3Config, *args, **kwargs):
        # Fields can be set after a config was made; no model is built from a contradiction.
        config.validate()
        super().__init__(config, *args, **kwargs)

    def get_correct_experts_implementation(self, requested_experts: str | None) -> str:
        return super().get_correct_experts_implementation("kimi3" if requested_experts is None else requested_experts)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Spec section 5: every parameter of every module, whatever memory it was built in."""
        std = self.config.initializer_range
        if isinstance(module, ResidualQuery):
            init.zeros_(module.weight)
        elif isinstance(module, nn.Linear | nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=std)
        elif isinstance(module, KimiK3RMSNorm | KimiK3GatedRMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, KimiK3ShortConvolution):
            # A depthwise tap sees W inputs: torch's own default for such a convolution.
            bound = module.weight.shape[-1] ** -0.5
            init.uniform_(module.weight, -bound, bound)
        elif isinstance(module, KimiDeltaAttention):
            init.uniform_(module.A_log, 1.0, 16.0)
            init.copy_(module.A_log, module.A_log.log())
            init.uniform_(module.dt_bias, math.log(1e-3), math.log(1e-1))
            step = module.dt_bias.exp()
            # Inverse of softplus: step + log(1 - exp(-step)).
            init.copy_(module.dt_bias, step + torch.log(-torch.expm1(-step)))
        elif isinstance(module, KimiK3Router):
            init.normal_(module.weight, mean=0.0, std=std)
            init.zeros_(module.e_score_correction_bias)
        elif isinstance(module, KimiK3Experts):
            init.normal_(module.gate_up_proj, mean=0.0, std=std)
            init.normal_(module.down_proj, mean=0.0, std=std)


class KimiK3Model(KimiK3PreTrainedModel):
    """The decoder without a language-model head."""

    # A causal LM's checkpoint read into the bare decoder has a head that is not wanted.
    _keys_to_ignore_on_load_unexpected = [*KimiK3PreTrainedModel._keys_to_ignore_on_load_unexpected, r"^lm_head\."]

    def __init__(self, config: KimiK3Config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([KimiK3DecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.has_attn_res = config.attn_res_block_size is not None
        if self.has_attn_res:
            self.output_attn_res_norm = ResidualNorm(config.hidden_size)
            self.output_attn_res_proj = ResidualQuery(config.hidden_size)
            self.output_attn_res_mix = AttentionResidualMix()
        self.norm = KimiK3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs,
    ) -> KimiK3ModelOutput:
        """
        Args:
            input_ids: `[B, T]`, or `inputs_embeds` `[B, T, D]` in its place.
            attention_mask: `[B, S]`, nonzero at real tokens, S counting cached and new tokens; padding may be left,
                right or both. Or a 4D mask for the softmax layers (then every token counts as real).
            position_ids: `[B, T]`. The family has no positional encoding: they matter only where they restart,
                which marks packed samples. `cu_seq_lens_q` marks them too.
            cache: continued and returned; a `KimiK3Cache` is made where `use_cache` asks for one. Packed samples
                have none.

        Raises:
            ValueError: both or neither of `input_ids` and `inputs_embeds`; a mask of the wrong length; a cache with
                packed samples.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Pass exactly one of input_ids and inputs_embeds.")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)

        attention_mask, layout, packed = build_masks(
            self.config, inputs_embeds, attention_mask, position_ids, cache, kwargs.get("cu_seq_lens_q")
        )
        if packed and cache is not None:
            raise ValueError(
                "cache must be None for packed samples (position_ids restart): a row's cache holds one sequence. "
                "Pass one sequence per row to generate or to fill a cache."
            )
        if use_cache and cache is None and not packed:
            cache = KimiK3Cache(self.config)
        if isinstance(cache, KimiK3Cache):
            cache.begin_forward(self.config, inputs_embeds.shape[0], self.layers[0].input_layernorm.weight.device)
        if packed:
            kwargs["position_ids"] = position_ids

        hidden_states = inputs_embeds
        blocks: tuple[torch.Tensor, ...] = ()
        block_inv_rms: tuple[torch.Tensor, ...] = ()
        for layer in self.layers:
            incoming = hidden_states
            hidden_states = layer(
                hidden_states,
                *blocks,
                block_inv_rms=block_inv_rms,
                attention_mask=attention_mask,
                layout=layout,
                cache=cache,
                **kwargs,
            )
            if layer.starts_block:
                blocks = (*blocks, incoming)
                block_inv_rms = (*block_inv_rms, inv_rms(incoming.detach(), ATTN_RES_EPS))
        if self.has_attn_res:
            weight = score_weight(self.output_attn_res_norm, self.output_attn_res_proj)
            hidden_states, _ = self.output_attn_res_mix([*blocks, hidden_states], weight, [*block_inv_rms, None])
        if isinstance(cache, KimiK3Cache):
            cache.end_forward()
        return KimiK3ModelOutput(last_hidden_state=self.norm(hidden_states), cache=cache)


class KimiK3ForCausalLM(KimiK3PreTrainedModel, GenerationMixin):
    """The decoder with its language-model head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: KimiK3Config):
        super().__init__(config)
        self.model = KimiK3Model(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
        # What the bare decoder may overlook; `post_init` collects the lists of all submodels.
        self._keys_to_ignore_on_load_unexpected -= set(KimiK3Model._keys_to_ignore_on_load_unexpected)
        self._keys_to_ignore_on_load_unexpected |= set(KimiK3PreTrainedModel._keys_to_ignore_on_load_unexpected)

    @can_return_tuple
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs,
    ) -> KimiK3CausalLMOutput:
        """As `KimiK3Model.forward`, and:

        Args:
            labels: `[B, T]` token ids, -100 where nothing is asked; shifted here. `num_items_in_batch` is honoured.
            logits_to_keep: how many last positions get logits (0: all), or their indices `[n]`.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return KimiK3CausalLMOutput(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.router_logits,
            attn_res_weights=outputs.attn_res_weights,
        )

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        """Hands out a `KimiK3Cache` where transformers would make its own dynamic cache."""
        kind = generation_config.cache_implementation
        if generation_config.use_cache is not False and model_kwargs.get("cache") is None:
            if kind in (None, "dynamic"):
                model_kwargs["cache"] = KimiK3Cache(self.config)
            elif kind == "quantized":
                model_kwargs["cache"] = quantized_cache(self.config, generation_config.cache_config)
                # What is already made must not be asked for as well.
                generation_config.cache_implementation = None
            elif "offloaded" in kind and self.device.type == "cpu":
                raise ValueError(
                    f"cache_implementation='{kind}' needs an accelerator, but the model is on cpu: there is nowhere "
                    "to offload to. Leave cache_implementation out."
                )
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        if generation_config.is_assistant and isinstance(model_kwargs.get("cache"), KimiK3Cache):
            # All drafted tokens may be turned down, and they were seen one by one.
            model_kwargs["cache"].widen_rollback((generation_config.max_new_tokens or 0) + 1)

    def _assisted_decoding(self, input_ids, *args, assistant_model=None, **kwargs):
        """Makes room for the longest draft: the first one comes in the same forward pass as the prompt."""
        cache, generation_config = kwargs.get("cache"), kwargs["generation_config"]
        if isinstance(cache, KimiK3Cache):
            draft = generation_config.prompt_lookup_num_tokens or 0
            if assistant_model is not None:
                default = GenerationConfig._get_default_generation_params()["num_assistant_tokens"]
                draft = max(draft, assistant_model.generation_config.num_assistant_tokens or default)
            cache.widen_rollback(draft + 1)
        return super()._assisted_decoding(input_ids, *args, assistant_model=assistant_model, **kwargs)


__all__ = ["KimiK3ForCausalLM", "KimiK3Model", "KimiK3PreTrainedModel"]
