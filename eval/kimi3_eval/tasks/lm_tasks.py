"""The lm-eval task class for what a task file alone cannot say."""

from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask


class _FileTask(ConfigurableTask):
    """A task whose file names its class, a key that lm-eval's task config does not know."""

    def __init__(self, config: dict) -> None:
        super().__init__(config={key: value for key, value in config.items() if key != "class"})


class LossTask(_FileTask):
    """Asks for the loss of every token of a text. The model class must have `token_losses`, as `kimi3-hf` has."""

    def construct_requests(self, doc: dict, ctx: Any, **kwargs: Any) -> Instance:
        """One request of the whole text."""
        return Instance(
            request_type="token_losses",  # type: ignore[arg-type]
            doc=doc,
            arguments=(doc["input"],),
            idx=0,
            metadata=kwargs["metadata"],
        )


class DocumentTask(_FileTask):
    """A task whose documents bring their own answer budget."""

    def construct_requests(self, doc: dict, ctx: Any, **kwargs: Any) -> list[Instance] | Instance:
        """One generation request with the document's budget."""
        request = super().construct_requests(doc, ctx, **kwargs)
        assert isinstance(request, Instance)
        prompt, generation = request.arguments
        request.arguments = (prompt, {**generation, "max_gen_toks": doc["budget"]})
        return request
