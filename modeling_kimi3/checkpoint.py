"""Loading that refuses to guess, saving that Trainer can resume from, and the way back to the released layout."""

import json
import os
from pathlib import Path

from .weight_mapping import release_conversions

_SHOWN = 8


def _list(names) -> str:
    """The first few of `names`, and how many more there are."""
    names = sorted(str(name) for name in names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


class CheckpointMixin:
    """`from_pretrained` and `save_pretrained` of all K3 models."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, output_loading_info=False, **kwargs):
        """As in transformers, but a checkpoint that does not fill the model exactly is an error.

        Transformers initialises missing tensors at random and only reports it. Vision tensors of a composite
        checkpoint are skipped knowingly, and so is `lm_head` where the bare decoder is asked for.

        Raises:
            ValueError: tensors are missing, unexpected, or of the wrong shape; each is named.
        """
        model, info = super().from_pretrained(
            pretrained_model_name_or_path, *model_args, output_loading_info=True, **kwargs
        )
        problems = []
        if info["missing_keys"]:
            problems.append(f"missing: {_list(info['missing_keys'])}")
        if info["unexpected_keys"]:
            unexpected = info["unexpected_keys"]
            hint = (
                " (indexer tensors belong to K3.1, which is not K3)"
                if any(".indexer." in k for k in unexpected)
                else ""
            )
            problems.append(f"unexpected: {_list(unexpected)}{hint}")
        if info["mismatched_keys"] and not kwargs.get("ignore_mismatched_sizes"):
            problems.append(f"wrong shape (name, stored, expected): {_list(info['mismatched_keys'])}")
        if problems:
            raise ValueError(
                f"The weights in {pretrained_model_name_or_path} do not fit {cls.__name__}: "
                + "; ".join(problems)
                + "."
            )
        return (model, info) if output_loading_info else model

    def save_pretrained(self, save_directory: str | os.PathLike, *args, save_original_format: bool = False, **kwargs):
        """As in transformers, with this package's layout as the default.

        Trainer's resume reads the files back with `load_state_dict`, which knows nothing of renamed or per-expert
        tensors; transformers' own default would restore nothing, with a warning only.

        Args:
            save_original_format: write the layout that the config came from (the released composite one where it
                came from none), tensors and `config.json` both, so that other tools for the family read it.
        """
        if not save_original_format:
            return super().save_pretrained(save_directory, *args, save_original_format=False, **kwargs)
        had = vars(self).get("_weight_conversions")
        self._weight_conversions = release_conversions(self.config)
        try:
            super().save_pretrained(save_directory, *args, save_original_format=True, **kwargs)
        finally:
            if had is None:
                del self._weight_conversions
            else:
                self._weight_conversions = had
        config_file = Path(save_directory) / "config.json"
        partial = config_file.with_suffix(".json.partial")
        partial.write_text(json.dumps(self.config.to_release_dict(), indent=2, sort_keys=True) + "\n")
        partial.replace(config_file)
