"""Kimi K3 for Hugging Face transformers. Importing this package registers the family with the Auto classes."""

from .compat import check_versions

check_versions()

from transformers import AutoModel, AutoModelForCausalLM  # noqa: E402

from .cache import KimiK3Cache  # noqa: E402
from .configuration_kimi3 import KimiK3Config, register_configs  # noqa: E402
from .modeling_kimi3 import KimiK3ForCausalLM, KimiK3Model, KimiK3PreTrainedModel  # noqa: E402
from .quantization import KimiMxfp4Config, register_quantization  # noqa: E402
from .tokenization_kimi3 import KimiK3ByteTokenizer, KimiK3Tokenizer, register_tokenizers  # noqa: E402
from .weight_mapping import register_weight_mapping  # noqa: E402

register_configs()
AutoModel.register(KimiK3Config, KimiK3Model, exist_ok=True)
AutoModelForCausalLM.register(KimiK3Config, KimiK3ForCausalLM, exist_ok=True)
register_tokenizers()
register_weight_mapping()
register_quantization()

__version__ = "0.1.0"

__all__ = [
    "KimiK3ByteTokenizer",
    "KimiK3Cache",
    "KimiK3Config",
    "KimiK3ForCausalLM",
    "KimiK3Model",
    "KimiK3PreTrainedModel",
    "KimiK3Tokenizer",
    "KimiMxfp4Config",
]
