"""What a K3 checkpoint directory holds, read from its files' headers alone."""

from .inspect import Inspection, inspect_checkpoint

__all__ = ["Inspection", "inspect_checkpoint"]
