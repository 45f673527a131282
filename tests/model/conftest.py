"""What tests of the model package share."""

import pytest


@pytest.fixture
def released():
    """A composite file as released, with every kind of key."""
    text = {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "rms_norm_eps": 1e-5,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "mla_use_nope": True,
        "linear_attn_config": {
            "kda_layers": [1, 2],
            "full_attn_layers": [3],
            "num_heads": 3,
            "head_dim": 8,
            "short_conv_kernel_size": 4,
        },
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }
    return {
        "model_type": "kimi_k3",
        "architectures": ["KimiK3ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"depth": 3, "nested": {"a": [1, 2]}},
        "media_placeholder_token_id": 5,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }
