"""Loading that refuses to guess, saving that Trainer can resume from, and the way back to the released layout."""

import json
import os
import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from .weight_mapping import WIDE, release_conversions

_SHOWN = 8
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


def _list(names) -> str:
    """The first few of `names`, and how many more there are."""
    names = sorted(str(name) for name in names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _reason(report: str) -> str:
    """The message inside transformers' report of a failed conversion, which starts with a traceback."""
    return report.rsplit("\nError", 1)[0].rsplit("\n", 1)[-1]


def _problems(info, ignore_mismatched_sizes: bool) -> list[str]:
    """What keeps the files from filling the model exactly, tensors named."""
    problems = [f"{name}: {_reason(report)}" for name, report in sorted(info.conversion_errors.items())]
    missing = info.missing_keys - info.conversion_errors.keys()
    if missing:
        problems.append(f"missing: {_list(missing)}")
    if info.unexpected_keys:
        hint = ""
        if any(".indexer." in key for key in info.unexpected_keys):
            hint = " (indexer tensors belong to K3.1, which is not K3)"
        elif any(re.search(r"\.experts\..*\.weight_packed$", key) for key in info.unexpected_keys):
            hint = " (packed experts: config.json has no quantization_config that says so)"
        problems.append(f"unexpected: {_list(info.unexpected_keys)}{hint}")
    if info.mismatched_keys and not ignore_mismatched_sizes:
        shapes = [
            f"{name} is {list(stored)}, expected {list(expected)}" for name, stored, expected in info.mismatched_keys
        ]
        problems.append(f"wrong shape: {_list(shapes)}")
    return problems


def _stored_dtypes(files) -> dict[str, torch.dtype]:
    """In which dtype safetensors files hold each kind of the parameters that a narrow model keeps in float32."""
    found: dict[str, torch.dtype] = {}
    for file in files or ():
        if not str(file).endswith(".safetensors"):
            continue
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():
                kind = next((kind for kind in WIDE if name.endswith(kind)), None)
                if kind is not None and kind not in found:
                    found[kind] = _DTYPES[handle.get_slice(name).get_dtype()]
    return found


class CheckpointMixin:
    """`from_pretrained` and `save_pretrained` of all K3 models."""

    @classmethod
    def _load_pretrained_model(cls, model, state_dict, checkpoint_files, load_config, *args, **kwargs):
        """As in transformers, but a damaged file is named, and the stored dtypes are kept for the way back.

        Raises:
            ValueError: a safetensors file cannot be read.
        """
        try:
            if found := _stored_dtypes(checkpoint_files):
                model._stored_dtypes = found
            return super()._load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
        except SafetensorError as error:
            for file in checkpoint_files or ():
                try:
                    with safe_open(file, framework="pt"):
                        pass
                except SafetensorError as damage:
                    raise ValueError(
                        f"{file} cannot be read as safetensors ({damage}): it is incomplete or damaged."
                    ) from error
            raise

    @classmethod
    def _finalize_model_loading(cls, model, load_config, loading_info):
        """As in transformers, but a checkpoint that does not fill the model exactly is an error.

        Transformers initialises missing tensors at random and only reports it. Vision tensors of a composite
        checkpoint are skipped knowingly, and so is `lm_head` where the bare decoder is asked for.

        Raises:
            ValueError: tensors are missing, unexpected, or of the wrong shape; each is named.
        """
        failure = None
        try:
            loading_info = super()._finalize_model_loading(model, load_config, loading_info)
        except RuntimeError as error:
            # Raised for conversions and shapes, without a name.
            failure = error
        problems = _problems(loading_info, load_config.ignore_mismatched_sizes)
        if problems:
            raise ValueError(
                f"The weights in {load_config.pretrained_model_name_or_path} do not fit {cls.__name__}: "
                + "; ".join(problems)
                + "."
            ) from failure
        if failure is not None:
            raise failure
        return loading_info

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        *args,
        save_original_format: bool = False,
        push_to_hub: bool = False,
        **kwargs,
    ):
        """As in transformers, with this package's layout as the default.

        Trainer's resume reads the files back with `load_state_dict`, which knows nothing of renamed or per-expert
        tensors; transformers' own default would restore nothing, with a warning only.

        Args:
            save_original_format: write the layout that the config came from (the released composite one where it
                came from none), tensors and `config.json` both, so that other tools for the family read it.

        Raises:
            ValueError: the released layout cannot hold the model as it is, or `push_to_hub` together with it.
        """
        if not save_original_format:
            return super().save_pretrained(
                save_directory, is_main_process, *args, save_original_format=False, push_to_hub=push_to_hub, **kwargs
            )
        if push_to_hub:
            # The files would be sent off before config.json is in its final form.
            raise ValueError(
                "push_to_hub=True with save_original_format=True: expected one of the two. Save first, then upload the "
                "directory."
            )
        # Before anything is written: this is where a model that no released file can hold is refused.
        self.config.to_release_dict()
        had = vars(self).get("_weight_conversions")
        self._weight_conversions = release_conversions(self)
        try:
            super().save_pretrained(save_directory, is_main_process, *args, save_original_format=True, **kwargs)
        finally:
            if had is None:
                del self._weight_conversions
            else:
                self._weight_conversions = had
        if is_main_process:
            config_file = Path(save_directory) / "config.json"
            # Never half a file: whoever interrupts this leaves the config that was written before, which loads too.
            partial = config_file.with_suffix(".json.partial")
            partial.write_text(json.dumps(self.config.to_release_dict(), indent=2, sort_keys=True) + "\n")
            partial.replace(config_file)
