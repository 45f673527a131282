"""Many questions over one long document: it is read once.

Shapes: T tokens of the document.
"""

from collections.abc import Iterable, Iterator

import torch

from .cache import KimiK3Cache
from .modeling_kimi3 import KimiK3ForCausalLM


@torch.no_grad()
def read_document(model: KimiK3ForCausalLM, document: torch.Tensor, chunk: int = 1024) -> KimiK3Cache:
    """Feeds `document` `[1, T]` to a new cache, `chunk` tokens at a time."""
    if document.dim() != 2 or document.shape[0] != 1 or document.shape[1] == 0:
        raise ValueError(f"document must be token ids of shape [1, T] with T >= 1, got {tuple(document.shape)}.")
    cache = KimiK3Cache(model.config)
    for part in document.split(chunk, dim=1):
        model(part, cache=cache, logits_to_keep=1)
    return cache


def answer_many(
    model: KimiK3ForCausalLM,
    document: torch.Tensor,
    questions: Iterable[torch.Tensor],
    cache: KimiK3Cache | None = None,
    **generate_kwargs,
) -> Iterator[torch.Tensor]:
    """Generates one answer per question, each as if `document + question` had been read anew.

    Args:
        document: `[1, T]` token ids.
        questions: `[1, n]` token ids each, n at least 1, chat template and all.
        cache: one that holds the document already (from a file, say); otherwise it is read here.
        **generate_kwargs: for `model.generate`.

    Yields:
        The new tokens `[1, m]` of each answer.

    Raises:
        ValueError: `cache` holds another number of tokens than the document, or a question is empty.
    """
    cache = read_document(model, document) if cache is None else cache
    if cache.get_seq_length() != document.shape[1]:
        raise ValueError(
            f"The cache holds {cache.get_seq_length()} tokens, but the document has {document.shape[1]}: "
            "pass the cache that read_document returned, or none."
        )
    snapshot = cache.snapshot()
    for question in questions:
        if question.shape[-1] == 0:
            raise ValueError("A question must have at least one token.")
        cache.restore(snapshot)
        ids = torch.cat([document, question], dim=1)
        yield model.generate(ids, cache=cache, **generate_kwargs)[:, ids.shape[1] :]
