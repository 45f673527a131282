"""Benchmarks of the whole model against transformers' native KimiLinear with equal weights, side by side in one run.

    python eval/bench.py                       # prefill and decode
    python eval/bench.py --op prefill --shape 2048
    python eval/bench.py --no-memory           # times only

One thread, float32 unless a shape says otherwise, medians. The model has 94M parameters: hidden 512, 8 layers (6 KDA of
4 heads x 128, 2 MLA of 4 heads with a latent of 512), 16 experts of which 4 are active, vocabulary 32k. Caches of the
decode rows are filled with random values of the stated length, so that no long prefill is needed.
"""

import argparse
import functools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))

import torch
from transformers import DynamicCache, KimiLinearConfig, KimiLinearForCausalLM
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearAttention

from bench_frame import Group, Run, measure_peak, measure_peak_here, measure_times, set_threads, table, warn_if_starved
from modeling_kimi3 import KimiK3Cache, KimiK3Config, KimiK3ForCausalLM
from modeling_kimi3.attention_mla import KimiMLAttention
from modeling_kimi3.presets import default_linear_attn_config

VOCAB = 32768
HEADS, HEAD_DIM = 4, 128


def native_config() -> KimiLinearConfig:
    """The benchmark's model in transformers' words."""
    return KimiLinearConfig(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1024,
        moe_intermediate_size=256,
        num_hidden_layers=8,
        num_local_experts=16,
        num_experts_per_token=4,
        num_shared_experts=1,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        linear_num_heads=HEADS,
        linear_head_dim=HEAD_DIM,
        layer_types=[*["linear_attention"] * 3, "full_attention"] * 2,
        mlp_layer_types=["dense", *["sparse"] * 7],
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def load(backend: str, dtype: torch.dtype) -> torch.nn.Module:
    """transformers' model ("native ..."), or ours with the same weights, through a directory in the released layout."""
    torch.manual_seed(0)
    native = KimiLinearForCausalLM(native_config()).eval().to(dtype)
    if backend.startswith("native"):
        native.set_attn_implementation(backend.split()[1])
        return native
    with tempfile.TemporaryDirectory() as directory:
        native.save_pretrained(directory)
        del native
        return KimiK3ForCausalLM.from_pretrained(directory, dtype=dtype)


def prefill(backend: str, length: int, dtype: torch.dtype) -> Run:
    """All logits of a prompt would be measured too; only the last is wanted, as in generation."""
    model = load(backend, dtype)
    ids = torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(1))
    return torch.no_grad()(lambda: model(ids, use_cache=True, logits_to_keep=1).logits)


def filled_cache(model: torch.nn.Module, length: int) -> object:
    """A cache of `length` tokens with random content, of the class that the model itself would make."""
    ours = isinstance(model, KimiK3ForCausalLM)
    cache = KimiK3Cache(model.config) if ours else DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.randint(3, VOCAB, (1, 8)), cache=cache)
        for index, kind in enumerate(model.config.layer_types):
            if kind == "full_attention":
                rank, rope = model.config.kv_lora_rank, model.config.qk_rope_head_dim
                content = torch.randn(1, 1, length - 8, rank + rope, dtype=model.dtype)
                cache.update(content[..., :rank], content[..., rank:], index)
    return cache


def decode(backend: str, length: int, dtype: torch.dtype) -> Run:
    """One token after `length` cached ones. The cache grows by one token a call, which changes nothing measurable."""
    model = load(backend, dtype)
    cache = filled_cache(model, length)
    ids = torch.tensor([[5]])
    return torch.no_grad()(lambda: model(ids, cache=cache, logits_to_keep=1).logits)


def group(
    op: str,
    run: Callable[[str, int, torch.dtype], Run],
    length: int,
    names: list[str],
    dtype: torch.dtype = torch.float32,
) -> Group:
    label = f"{length} tokens, {str(dtype).removeprefix('torch.')}"
    return Group(op, label, {n: functools.partial(run, n, length, dtype) for n in names}, memory=op == "prefill")


def mla_step(backend: str, length: int, dtype: torch.dtype) -> Run:
    """One token through one MLA layer of 32 heads (a Kimi-Linear-48B layer), against `length` cached latents."""
    config = native_config()
    config.num_attention_heads = config.num_key_value_heads = 32
    torch.manual_seed(0)
    if backend == "modeling_kimi3":
        layer = KimiMLAttention(KimiK3Config(**config.to_dict()), 3)
        cache = KimiK3Cache(layer.config)
    else:
        config._attn_implementation = backend.split()[1]
        layer, cache = KimiLinearAttention(config, 3), DynamicCache(config=config)
    layer = layer.to(dtype).eval()
    cache.update(torch.randn(1, 1, length, 512, dtype=dtype), torch.randn(1, 1, length, 64, dtype=dtype), 3)
    x = torch.randn(1, 1, config.hidden_size, dtype=dtype)
    return torch.no_grad()(lambda: layer(x, attention_mask=None, cache=cache)[0])


def k3_ratio_config() -> KimiK3Config:
    """K3's proportions at 0.5B parameters: three KDA layers to one of MLA, a latent that is small beside the width.

    As in K3 itself, where a token at 128k reads 3.6 GB of latents and about 200 GB of weights, attention does not
    dominate.
    """
    return KimiK3Config(
        vocab_size=VOCAB,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=8,
        num_attention_heads=8,
        q_lora_rank=512,
        kv_lora_rank=64,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        linear_attn_config=default_linear_attn_config(8, num_heads=16, head_dim=128),
        attn_res_block_size=4,
        num_experts=None,
    )


def decode_k3_ratio(backend: str, length: int, dtype: torch.dtype) -> Run:
    """One token of `k3_ratio_config` after as many cached ones as the backend's name says."""
    torch.manual_seed(0)
    model = KimiK3ForCausalLM(k3_ratio_config()).eval().to(dtype)
    cache = filled_cache(model, int(backend.split()[1]))
    return torch.no_grad()(lambda: model(torch.tensor([[5]]), cache=cache, logits_to_keep=1).logits)


NATIVE = ["native sdpa", "native eager"]
GROUPS = [
    group("prefill", prefill, 2048, [*NATIVE, "modeling_kimi3"]),
    group("prefill", prefill, 8192, ["native sdpa", "modeling_kimi3"]),
    group("decode", decode, 1024, [*NATIVE, "modeling_kimi3"]),
    group("decode", decode, 8192, [*NATIVE, "modeling_kimi3"]),
    group("decode", decode, 32768, [*NATIVE, "modeling_kimi3"]),
    group("decode", decode, 131072, ["modeling_kimi3"]),
    group("decode, K3's proportions", decode_k3_ratio, 0, ["at 1024", "at 131072"]),
    group("one MLA layer, one token", mla_step, 32768, [*NATIVE, "modeling_kimi3"], torch.bfloat16),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", default="", help="only operations whose name contains this")
    parser.add_argument("--shape", default="", help="only shapes whose label contains this")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget", type=float, default=30.0, help="seconds per backend, after three rounds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: for a busy machine, one thread")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--peak", nargs=3, metavar=("OP", "SHAPE", "BACKEND"), help="print one peak in bytes and exit")
    args = parser.parse_args()
    set_threads(args.threads)
    if args.peak:
        op, shape, backend = args.peak
        chosen = next(g for g in GROUPS if (g.op, g.shape) == (op, shape))
        print(measure_peak_here(chosen.backends[backend]()))
        return
    rows = []
    for chosen in GROUPS:
        if args.op not in chosen.op or args.shape not in chosen.shape:
            continue
        measured = measure_times(chosen, args.rounds, args.budget, args.clock)
        warn_if_starved(measured, args.threads)
        if chosen.memory and not args.no_memory:
            for row in measured:
                row.peak = measure_peak(chosen, row.backend, args.threads)
        rows += measured
        print(f"measured: {chosen.op}, {chosen.shape}", file=sys.stderr, flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
