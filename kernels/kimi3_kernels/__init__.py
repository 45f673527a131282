"""Kernels of Kimi K3. Importing this package needs torch only."""

from kimi3_kernels.kda import kda_chunk, kda_gate, kda_recurrent, kda_step, l2norm

__all__ = [
    "kda_chunk",
    "kda_gate",
    "kda_recurrent",
    "kda_step",
    "l2norm",
]
