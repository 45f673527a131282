"""Blocks in which an operation goes through large tensors, so that what it works on stays in a CPU's cache."""

from collections.abc import Iterator

# 1 MiB in float32: ten such blocks (the sources of a mix, inputs and outputs of a convolution) fit in a last-level
# cache, and the operations on one cost far more than their dispatch.
CPU_ELEMENTS = 2**18
# Elsewhere a block only bounds the extra memory: launches would dominate small ones.
ELEMENTS = 2**25
# Up to this many elements an operator's dispatch costs more than it saves.
SMALL = 2**16


def block_elements(device_type: str) -> int:
    return CPU_ELEMENTS if device_type == "cpu" else ELEMENTS


def spans(size: int, step: int) -> Iterator[slice]:
    """Consecutive slices of at most `step` that cover `size`."""
    return (slice(start, min(start + step, size)) for start in range(0, size, max(1, step)))
