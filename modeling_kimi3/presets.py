"""Small models for tests and demonstrations, with every mechanism of the released K3.

All have the 256 ids of `KimiK3ByteTokenizer`, a dense first layer, experts in a latent with norm, bounded decay, gated
MLA with query compression, and attention residuals whose last block is shorter than the others. Expert widths are
multiples of 32, so that they can be packed as MXFP4.
"""

from typing import Any


def default_linear_attn_config(depth: int, num_heads: int, head_dim: int) -> dict[str, Any]:
    """`linear_attn_config` of `depth` layers in the released K3's pattern: softmax at every fourth and at the last."""
    softmax = [layer for layer in range(1, depth + 1) if layer % 4 == 0 or layer == depth]
    return {
        "full_attn_layers": softmax,
        "gate_lower_bound": -5.0,
        "head_dim": head_dim,
        "kda_layers": [layer for layer in range(1, depth + 1) if layer not in softmax],
        "num_heads": num_heads,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
    }


_BYTES: dict[str, Any] = {"vocab_size": 256, "bos_token_id": 254, "eos_token_id": 253, "pad_token_id": 255}

PRESETS: dict[str, dict[str, Any]] = {
    "tiny-1m": {
        **_BYTES,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 3,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 64,
        "routed_expert_hidden_size": 64,
        "attn_res_block_size": 4,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "linear_attn_config": default_linear_attn_config(6, num_heads=2, head_dim=32),
    },
    "small-20m": {
        **_BYTES,
        "hidden_size": 320,
        "intermediate_size": 1280,
        "num_hidden_layers": 10,
        "num_attention_heads": 5,
        "num_experts": 16,
        "num_experts_per_token": 4,
        "moe_intermediate_size": 160,
        "routed_expert_hidden_size": 160,
        "attn_res_block_size": 4,
        "q_lora_rank": 160,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "linear_attn_config": default_linear_attn_config(10, num_heads=5, head_dim=64),
    },
    "base-150m": {
        **_BYTES,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 11,
        "num_attention_heads": 8,
        "num_experts": 32,
        "num_experts_per_token": 4,
        "moe_intermediate_size": 256,
        "routed_expert_hidden_size": 384,
        "attn_res_block_size": 4,
        "q_lora_rank": 384,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "linear_attn_config": default_linear_attn_config(11, num_heads=6, head_dim=128),
    },
}
