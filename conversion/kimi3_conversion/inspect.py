"""`kimi3-convert inspect DIR`: parameters per mechanism and bytes by stored dtype, without loading a tensor.

Reads the safetensors headers only, so that it takes seconds for the released 1.56 TB too.
"""

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import safe_open

from modeling_kimi3 import KimiK3Config

# Parts of a tensor's name, in the order in which they are looked for.
MECHANISMS = {
    "vision_tower.": "vision",
    "mm_projector.": "vision",
    ".experts.": "routed experts",
    "shared_experts": "shared experts",
    "routed_expert_": "expert latent",
    "block_sparse_moe.gate.": "router",
    "_res_": "attention residuals",
    ".mlp.": "dense feed-forward",
    "embed_tokens": "embedding and head",
    "lm_head": "embedding and head",
    "norm": "norms",
}
_ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "I16": 2, "U8": 1, "I8": 1, "BOOL": 1}


@dataclass
class Inspection:
    """Counts of one directory.

    Attributes:
        parameters: values per mechanism; two per byte of a packed expert, none for its scales.
        stored_bytes: per stored dtype.
        unknown: names of tensors that belong to no part of the family.
    """

    parameters: Counter[str] = field(default_factory=Counter)
    stored_bytes: Counter[str] = field(default_factory=Counter)
    unknown: list[str] = field(default_factory=list)

    def report(self) -> str:
        """A table for people."""
        total = sum(self.parameters.values())
        lines = [f"{total:>20,}  parameters"]
        lines += [f"{count:>20,}  {name}" for name, count in self.parameters.most_common()]
        lines += [f"{count:>20,}  bytes of {name}" for name, count in self.stored_bytes.most_common()]
        lines += [f"unknown tensor: {name}" for name in self.unknown]
        return "\n".join(lines)


def mechanism_of(name: str, config: KimiK3Config) -> str | None:
    """Which part of the model a tensor belongs to, by its released or its own name; None if to none."""
    name = name.removeprefix("language_model.")
    if ".self_attn." in name:
        layer = int(name.split("layers.")[1].split(".")[0])
        return "KDA" if config.is_kda_layer(layer) else "MLA"
    return next((mechanism for part, mechanism in MECHANISMS.items() if part in name), None)


def checkpoint_files(directory: Path) -> list[Path]:
    """The safetensors files of a directory, as its index or its only file says.

    Raises:
        FileNotFoundError: there are none, or one that the index names is missing.
    """
    index = directory / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    missing = [name for name in names if not (directory / name).exists()]
    if missing:
        raise FileNotFoundError(f"{directory}: {', '.join(missing)} not found.")
    return [directory / name for name in names]


def inspect_checkpoint(directory: str | Path) -> Inspection:
    """Counts what lies in a checkpoint directory, in the released or in this package's layout.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the config is not one of the family's, or contradicts itself.
    """
    directory = Path(directory)
    config = KimiK3Config.from_pretrained(directory)
    found = Inspection()
    for file in checkpoint_files(directory):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():
                header = tensors.get_slice(name)
                count, dtype = math.prod(header.get_shape()), header.get_dtype()
                found.stored_bytes[dtype] += count * _ITEM_BYTES[dtype]
                mechanism = mechanism_of(name, config)
                if mechanism is None:
                    found.unknown.append(name)
                elif not name.endswith("weight_scale"):
                    found.parameters[mechanism] += 2 * count if name.endswith("weight_packed") else count
    return found
