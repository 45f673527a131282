"""The README's first command: makes a small K3 and runs `kimi3-eval` on it.

    python eval/demo.py [DIRECTORY]        # default: demo

The checkpoint has all four mechanisms and 1.1M random weights, so its recall is 0: the demo shows that the whole way
works on this machine (checkpoint, AutoModel, cache, lm-eval, report), not what a trained model remembers.
"""

import sys
from pathlib import Path

import torch

from kimi3_eval.cli import main as kimi3_eval
from modeling_kimi3 import KimiK3ByteTokenizer, KimiK3Config, KimiK3ForCausalLM


def make_checkpoint(directory: Path) -> None:
    """Writes the model and its byte tokenizer, unless they are there already."""
    if (directory / "model.safetensors").exists() and (directory / "tokenizer.json").exists():
        return
    torch.manual_seed(0)
    KimiK3ForCausalLM(KimiK3Config.from_preset("tiny-1m")).save_pretrained(directory)
    KimiK3ByteTokenizer().save_pretrained(directory)


def main() -> int:
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "demo")
    make_checkpoint(directory / "model")
    arguments = ["run", str(directory / "model"), "--tasks", "niah_single_1", "--lengths", "512,1024"]
    arguments += ["--depths", "0,0.5,1", "--samples", "1", "--hold-back", "softmax-window=128"]
    return kimi3_eval([*arguments, "--output", str(directory / "run")]) or 0


if __name__ == "__main__":
    sys.exit(main())
