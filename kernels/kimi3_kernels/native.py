"""Optional C++ operators for the CPU: built on request where a compiler exists, never needed.

    import kimi3_kernels.native
    kimi3_kernels.native.build()        # about half a minute the first time, then from torch's extension cache

or `KIMI3_KERNELS_NATIVE=1` in the environment, which builds at the first decode step. Their references are the plain
torch forms, which stay in use for every input that an operator does not take.
"""

import os
import warnings
from pathlib import Path

import torch

_SOURCES = Path(__file__).parent / "csrc"
_built: bool | None = None


def build(verbose: bool = False) -> bool:
    """Compiles and loads the operators; later calls return at once.

    Returns:
        Whether they are in use. False, with one warning that says why, where they cannot be built.
    """
    global _built
    if _built is None:
        try:
            from torch.utils.cpp_extension import load

            load(
                name="kimi3_native",
                sources=[str(_SOURCES / "kda_step.cpp")],
                # Not -ffast-math: linking with it would flush subnormals to zero in the whole process.
                extra_cflags=["-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp"],
                extra_ldflags=["-fopenmp"],
                verbose=verbose,
            )
            _built = True
        except Exception as error:
            warnings.warn(
                f"kimi3_kernels: the C++ operators could not be built, plain torch is used ({error}).", stacklevel=2
            )
            _built = False
    return _built


def _wanted() -> bool:
    if _built is None and os.environ.get("KIMI3_KERNELS_NATIVE") == "1":
        return build()
    return bool(_built)


def takes_kda_step(state: torch.Tensor) -> bool:
    """Whether the C++ decode step applies: built, and a float32 state on the CPU outside a compiled graph."""
    if state.device.type != "cpu" or state.dtype != torch.float32 or torch.compiler.is_compiling():
        return False
    return _wanted()


def kda_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """`kimi3_kernels.kda_step` for a state that `takes_kda_step` takes; the result is float32."""
    inputs = (tensor.float().contiguous() for tensor in (q, k, v, g, beta))
    return torch.ops.kimi3_native.kda_step(*inputs, state, scale)
