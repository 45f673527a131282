"""Which versions this package works with, and what it relies on inside transformers beyond the documented API."""

import sys
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

MINIMUM_PYTHON = (3, 11)
SUPPORTED = {"torch": ">=2.9", "transformers": ">=5.24,<6"}


def check_versions() -> None:
    """Stops the import where Python, torch or transformers is of a version that this package was not made for.

    Raises:
        ImportError: one sentence that says what is needed and what is there.
    """
    needed = f"Python >={'.'.join(map(str, MINIMUM_PYTHON))}, " + " and ".join(
        f"{name} {specifier}" for name, specifier in SUPPORTED.items()
    )
    found = None
    if sys.version_info < MINIMUM_PYTHON:
        found = f"this is Python {sys.version.split()[0]}"
    for name, specifier in SUPPORTED.items():
        try:
            installed = version(name)
        except PackageNotFoundError:
            found = f"{name} is not installed"
            continue
        if not SpecifierSet(specifier).contains(installed, prereleases=True):
            found = f"{name} {installed} is installed"
    if found is not None:
        raise ImportError(f"modeling_kimi3 works with {needed}, but {found}.")


# Everything imported from inside transformers. A test compares this list with the imports in the code, and another one
# resolves each name, so that a transformers release that moves one is seen at once.
IMPORTED_INTERNALS = (
    "transformers.cache_utils.Cache",
    "transformers.cache_utils.CacheLayerMixin",
    "transformers.cache_utils.LinearAttentionLayer",
    "transformers.configuration_utils.PreTrainedConfig",
    "transformers.conversion_mapping.register_checkpoint_conversion_mapping",
    "transformers.core_model_loading.Concatenate",
    "transformers.core_model_loading.ConversionOps",
    "transformers.core_model_loading.MergeModulelist",
    "transformers.core_model_loading.PrefixChange",
    "transformers.core_model_loading.WeightConverter",
    "transformers.core_model_loading.WeightRenaming",
    "transformers.core_model_loading.WeightTransform",
    "transformers.core_model_loading._IdentityOp",
    "transformers.generation.GenerationConfig",
    "transformers.generation.GenerationMixin",
    "transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS",
    "transformers.integrations.moe.use_experts_implementation",
    "transformers.integrations.sdpa_attention.sdpa_attention_forward",
    "transformers.masking_utils.AttentionMaskInterface",
    "transformers.masking_utils.and_masks",
    "transformers.masking_utils.create_causal_mask",
    "transformers.masking_utils.sdpa_mask",
    "transformers.masking_utils.sliding_window_overlay",
    "transformers.modeling_layers.GradientCheckpointingLayer",
    "transformers.modeling_outputs.MoeCausalLMOutputWithPast",
    "transformers.modeling_outputs.MoeModelOutputWithPast",
    "transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS",
    "transformers.modeling_utils.PreTrainedModel",
    "transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES",
    "transformers.models.auto.tokenization_auto.REGISTERED_TOKENIZER_CLASSES",
    "transformers.models.auto.tokenization_auto.TOKENIZER_MAPPING_NAMES",
    "transformers.models.kimi_linear.configuration_kimi_linear.KimiLinearConfig",
    "transformers.quantizers.auto.AUTO_QUANTIZATION_CONFIG_MAPPING",
    "transformers.quantizers.auto.register_quantization_config",
    "transformers.quantizers.auto.register_quantizer",
    "transformers.quantizers.base.HfQuantizer",
    "transformers.tokenization_utils_tokenizers.TokenizersBackend",
    "transformers.utils.deprecation.deprecate_kwarg",
    "transformers.utils.generic.can_return_tuple",
    "transformers.utils.generic.is_tracing",
    "transformers.utils.generic.merge_with_config_defaults",
    "transformers.utils.logging",
    "transformers.utils.output_capturing.OutputRecorder",
    "transformers.utils.output_capturing.capture_outputs",
    "transformers.utils.quantization_config.Mxfp4Config",
)

# What the package overrides, or sets for transformers to read, without importing it by name.
OVERRIDDEN_INTERNALS = (
    "transformers.cache_utils.Cache.crop",
    "transformers.cache_utils.Cache.get_seq_length",
    "transformers.cache_utils.CacheLayerMixin.get_mask_sizes",
    "transformers.cache_utils.CacheLayerMixin.is_croppable",
    "transformers.cache_utils.CacheLayerMixin.lazy_initialization",
    "transformers.cache_utils.CacheLayerMixin.reorder_cache",
    "transformers.cache_utils.CacheLayerMixin.update",
    "transformers.cache_utils.LinearAttentionLayer.is_compileable",
    "transformers.cache_utils.LinearAttentionLayer.update_conv_state",
    "transformers.cache_utils.LinearAttentionLayer.update_recurrent_state",
    "transformers.configuration_utils.PreTrainedConfig.__post_init__",
    "transformers.configuration_utils.PreTrainedConfig.attribute_map",
    "transformers.configuration_utils.PreTrainedConfig.from_dict",
    "transformers.configuration_utils.PreTrainedConfig.get_config_dict",
    "transformers.configuration_utils.PreTrainedConfig.validate",
    "transformers.core_model_loading.ConversionOps.convert",
    "transformers.core_model_loading.ConversionOps.reverse_op",
    "transformers.generation.GenerationConfig._get_default_generation_params",
    "transformers.generation.GenerationMixin._assisted_decoding",
    "transformers.generation.GenerationMixin._prepare_cache_for_generation",
    "transformers.modeling_utils.PreTrainedModel._can_compile_fullgraph",
    "transformers.modeling_utils.PreTrainedModel._can_record_outputs",
    "transformers.modeling_utils.PreTrainedModel._can_set_attn_implementation",
    "transformers.modeling_utils.PreTrainedModel._can_set_experts_implementation",
    "transformers.modeling_utils.PreTrainedModel._init_weights",
    "transformers.modeling_utils.PreTrainedModel._keep_in_fp32_modules_strict",
    "transformers.modeling_utils.PreTrainedModel._keys_to_ignore_on_load_unexpected",
    "transformers.modeling_utils.PreTrainedModel._no_split_modules",
    "transformers.modeling_utils.PreTrainedModel._skip_keys_device_placement",
    "transformers.modeling_utils.PreTrainedModel._supports_attention_backend",
    "transformers.modeling_utils.PreTrainedModel._supports_flash_attn",
    "transformers.modeling_utils.PreTrainedModel._supports_flex_attn",
    "transformers.modeling_utils.PreTrainedModel._supports_sdpa",
    "transformers.modeling_utils.PreTrainedModel._tied_weights_keys",
    "transformers.modeling_utils.PreTrainedModel.loss_function",
    "transformers.modeling_utils.PreTrainedModel.save_pretrained",
    "transformers.quantizers.base.HfQuantizer.get_load_operations",
    "transformers.quantizers.base.HfQuantizer.get_weight_conversions",
    "transformers.quantizers.base.HfQuantizer.is_serializable",
    "transformers.quantizers.base.HfQuantizer.is_trainable",
    "transformers.quantizers.base.HfQuantizer.validate_environment",
    "transformers.tokenization_utils_tokenizers.TokenizersBackend.apply_chat_template",
    "transformers.tokenization_utils_tokenizers.TokenizersBackend.convert_to_native_format",
)
