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

# What the package's classes override or set in transformers' classes, by class. A test compares this with the code.
OVERRIDDEN_MEMBERS = {
    "transformers.cache_utils.Cache": ("crop", "get_seq_length", "reset"),
    "transformers.cache_utils.CacheLayerMixin": (
        "get_mask_sizes",
        "get_max_length",
        "get_seq_length",
        "is_croppable",
        "lazy_initialization",
        "offload",
        "prefetch",
        "reorder_cache",
        "reset",
        "update",
    ),
    "transformers.cache_utils.LinearAttentionLayer": (
        "crop",
        "is_compileable",
        "is_croppable",
        "reorder_cache",
        "reset",
        "update_conv_state",
        "update_recurrent_state",
    ),
    "transformers.configuration_utils.PreTrainedConfig": (
        "__post_init__",
        "attribute_map",
        "from_dict",
        "get_config_dict",
        "model_type",
        "validate",
    ),
    "transformers.core_model_loading.ConversionOps": ("convert", "reverse_op"),
    "transformers.core_model_loading.WeightConverter": ("convert",),
    "transformers.generation.GenerationMixin": ("_assisted_decoding", "_prepare_cache_for_generation"),
    "transformers.modeling_utils.PreTrainedModel": (
        "_can_compile_fullgraph",
        "_can_record_outputs",
        "_can_set_attn_implementation",
        "_can_set_experts_implementation",
        "_finalize_model_loading",
        "_init_weights",
        "_keep_in_fp32_modules_strict",
        "_keys_to_ignore_on_load_unexpected",
        "_load_pretrained_model",
        "_no_split_modules",
        "_skip_keys_device_placement",
        "_supports_attention_backend",
        "_supports_flash_attn",
        "_supports_flex_attn",
        "_supports_sdpa",
        "_tied_weights_keys",
        "base_model_prefix",
        "config_class",
        "get_correct_experts_implementation",
        "save_pretrained",
        "supports_gradient_checkpointing",
    ),
    "transformers.quantizers.base.HfQuantizer": (
        "get_load_operations",
        "get_weight_conversions",
        "is_serializable",
        "is_trainable",
        "requires_calibration",
        "serialized_names",
        "validate_environment",
    ),
    "transformers.tokenization_utils_tokenizers.TokenizersBackend": (
        "apply_chat_template",
        "convert_to_native_format",
        "vocab_files_names",
    ),
    "transformers.utils.quantization_config.Mxfp4Config": ("to_dict",),
}

# Parameters by name: those the package passes, and those transformers passes to what the package overrides.
PARAMETERS = {
    "transformers.AutoConfig.register": ("model_type", "config", "exist_ok"),
    "transformers.AutoModel.register": ("config_class", "model_class", "exist_ok"),
    "transformers.cache_utils.Cache.__init__": ("layers",),
    "transformers.cache_utils.Cache.crop": ("tokens_to_remove",),
    "transformers.cache_utils.Cache.get_seq_length": ("layer_idx",),
    "transformers.cache_utils.Cache.update": ("key_states", "value_states", "layer_idx"),
    "transformers.cache_utils.CacheLayerMixin.get_mask_sizes": ("query_length",),
    "transformers.cache_utils.CacheLayerMixin.update": ("key_states", "value_states"),
    "transformers.cache_utils.LinearAttentionLayer.update_conv_state": ("conv_states", "state_idx", "conv_kernel_size"),
    "transformers.cache_utils.LinearAttentionLayer.update_recurrent_state": ("recurrent_states", "state_idx"),
    "transformers.conversion_mapping.register_checkpoint_conversion_mapping": (
        "model_type_or_class_name",
        "mapping",
        "overwrite",
    ),
    "transformers.core_model_loading.ConversionOps.convert": ("input_dict", "source_patterns", "target_patterns"),
    "transformers.core_model_loading.PrefixChange.__init__": ("prefix_to_remove",),
    "transformers.core_model_loading.WeightConverter.__init__": ("source_patterns", "target_patterns", "operations"),
    "transformers.core_model_loading.WeightRenaming.__init__": ("source_patterns", "target_patterns"),
    "transformers.generation.GenerationMixin._assisted_decoding": ("input_ids", "generation_config", "assistant_model"),
    "transformers.generation.GenerationMixin._prepare_cache_for_generation": ("generation_config", "model_kwargs"),
    "transformers.loss.loss_utils.ForCausalLMLoss": ("logits", "labels", "vocab_size", "num_items_in_batch"),
    "transformers.masking_utils.create_causal_mask": (
        "config",
        "inputs_embeds",
        "attention_mask",
        "cache",
        "and_mask_function",
    ),
    "transformers.modeling_utils.PreTrainedModel.get_correct_experts_implementation": ("requested_experts",),
    "transformers.modeling_utils.PreTrainedModel.save_pretrained": ("save_directory", "save_original_format"),
    "transformers.tokenization_utils_tokenizers.TokenizersBackend.apply_chat_template": ("tokenizer_kwargs",),
    "transformers.tokenization_utils_tokenizers.TokenizersBackend.convert_to_native_format": ("trust_remote_code",),
    "transformers.utils.deprecation.deprecate_kwarg": ("old_name", "version", "new_name"),
    "transformers.utils.output_capturing.OutputRecorder": ("target_class", "index"),
    "transformers.utils.quantization_config.Mxfp4Config.__init__": ("dequantize",),
}

# What the package reads of objects that transformers hands out.
READ_ATTRIBUTES = (
    "transformers.generation.GenerationConfig._get_default_generation_params",
    "transformers.modeling_utils.PreTrainedModel.loss_function",
)

TRANSFORMERS_INTERNALS = (
    *IMPORTED_INTERNALS,
    *(f"{owner}.{member}" for owner, members in OVERRIDDEN_MEMBERS.items() for member in members),
    *PARAMETERS,
    *READ_ATTRIBUTES,
)
