"""The lm-eval task class for what a task file alone cannot say."""

from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask


class DocumentTask(ConfigurableTask):
    """A task whose documents bring their own answer budget."""

    def __init__(self, config: dict) -> None:
        super().__init__(config={key: value for key, value in config.items() if key != "class"})

    def construct_requests(self, doc: dict, ctx: Any, **kwargs: Any) -> list[Instance] | Instance:
        """One generation request with the document's budget."""
        request = super().construct_requests(doc, ctx, **kwargs)
        assert isinstance(request, Instance)
        prompt, generation = request.arguments
        request.arguments = (prompt, {**generation, "max_gen_toks": doc["budget"]})
        return request
