"""Long-range retrieval and memory evaluation of causal language models through lm-eval, offline.

`kimi3-eval run MODEL` is the command line; `kimi3_eval.tasks` holds the generators, `kimi3_eval.tasks.TASK_DIR` the
lm-eval task files, `kimi3_eval.model` the lm-eval model class.
"""

__version__ = "0.1.0"
