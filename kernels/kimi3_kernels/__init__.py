"""Operations of the K3 family, each with a plain torch reference. Chosen by the tensors' device alone."""

from .activation import situ
from .attn_res import attn_res_mix, attn_res_mix_ref, inv_rms
from .kda import kda_chunk, kda_gate, kda_recurrent, kda_step, l2norm
from .mxfp4 import mxfp4_decode, mxfp4_decode_ref, mxfp4_encode
from .norm import gated_rms_norm, rms_norm
from .short_conv import short_conv, short_conv_step

__all__ = [
    "attn_res_mix",
    "attn_res_mix_ref",
    "gated_rms_norm",
    "inv_rms",
    "kda_chunk",
    "kda_gate",
    "kda_recurrent",
    "kda_step",
    "l2norm",
    "mxfp4_decode",
    "mxfp4_decode_ref",
    "mxfp4_encode",
    "rms_norm",
    "short_conv",
    "short_conv_step",
    "situ",
]
