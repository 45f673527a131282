"""MXFP4 experts as the released files hold them (spec section 6), through transformers' quantiser interface.

Shapes: O output rows, I input columns of one expert matrix.
"""

import torch
from transformers.core_model_loading import ConversionOps, _IdentityOp
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import Mxfp4Config

from kimi3_kernels import mxfp4_decode

from .configuration_kimi3 import QUANTIZATION_METHOD


class KimiMxfp4Config(Mxfp4Config):
    """How to load a checkpoint whose experts are MXFP4.

    Subclasses transformers' own MXFP4 config because `from_pretrained(quantization_config=...)` lets only a fixed
    set of classes override what the checkpoint says.

    Args:
        dequantize: decode the experts into the model's dtype while loading. Keeping them packed is not available
            yet, so False is refused.
        **kwargs: the released quantisation settings, kept so that they can be written back.
    """

    def __init__(self, dequantize: bool = True, **kwargs):
        super().__init__(dequantize=dequantize)
        if not dequantize:
            raise ValueError("dequantize=False: experts cannot be kept packed yet, expected dequantize=True.")
        kwargs.pop("modules_to_not_convert", None)
        self.quant_method = QUANTIZATION_METHOD
        self.released = kwargs

    def to_dict(self) -> dict:
        return {**self.released, "quant_method": self.quant_method}


class KimiMxfp4Dequantize(ConversionOps):
    """`weight_packed [O, I/2]` and `weight_scale [O, I/32]` of each expert to `weight [O, I]` in the model's dtype.

    Experts that are dense in spite of the config, as in dequantised copies that kept it, pass through. Keys stay the
    sources' own, one per projection, since the stacking that follows tells them apart by these.
    """

    def __init__(self, hf_quantizer: HfQuantizer):
        self.hf_quantizer = hf_quantizer

    def convert(self, input_dict, source_patterns, target_patterns, model=None, full_layer_name=None, **kwargs):
        dtype = model.get_parameter(full_layer_name).dtype
        decoded: dict[str, list[torch.Tensor]] = {}
        for key, tensors in input_dict.items():
            if key.endswith("weight"):
                decoded[key] = [tensor.to(dtype) for tensor in tensors]
            elif key.endswith("weight_packed"):
                scales = input_dict[key.removesuffix("packed") + "scale"]
                decoded[key] = [mxfp4_decode(packed, scale, dtype) for packed, scale in zip(tensors, scales)]
        return decoded

    @property
    def reverse_op(self) -> ConversionOps:
        return _IdentityOp()


class KimiMxfp4Quantizer(HfQuantizer):
    """Loads MXFP4 experts; which tensors are packed is read from their names, not from the config's ignore list."""

    requires_calibration = False
    serialized_names = {"weight": ["weight", "weight_packed", "weight_scale"]}

    def get_load_operations(self) -> dict:
        return {"dequantize": KimiMxfp4Dequantize}

    def get_weight_conversions(self) -> list:
        return []

    def validate_environment(self, *args, **kwargs) -> None:
        if not self.pre_quantized:
            raise ValueError(
                "quantization_config=KimiMxfp4Config(...) reads experts that are MXFP4 already; this checkpoint has "
                "no quantization_config. Load it without one."
            )

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return self.quantization_config.dequantize


def register_quantization() -> None:
    """Makes transformers know the method; a second call changes nothing."""
    if QUANTIZATION_METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(QUANTIZATION_METHOD)(KimiMxfp4Config)
        register_quantizer(QUANTIZATION_METHOD)(KimiMxfp4Quantizer)
