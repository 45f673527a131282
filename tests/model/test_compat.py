"""Version check and the list of transformers internals that the package relies on."""

import ast
import importlib
from pathlib import Path

import pytest

from modeling_kimi3 import compat

ROOT = Path(__file__).parents[2]
PACKAGES = ("modeling_kimi3", "kernels/kimi3_kernels", "conversion/kimi3_conversion", "eval/kimi3_eval")


def resolve(dotted):
    """The object that a dotted name stands for: its longest importable prefix, then attributes."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for name in parts[cut:]:
            found = getattr(found, name)
        return found
    raise ModuleNotFoundError(dotted)


@pytest.mark.parametrize("name", compat.IMPORTED_INTERNALS + compat.OVERRIDDEN_INTERNALS)
def test_internal_exists(name):
    resolve(name)


def test_resolve_notices_a_moved_name():
    with pytest.raises(AttributeError):
        resolve("transformers.cache_utils.Cache.no_such_method")


def test_list_of_internals_is_complete():
    used = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                # Names of the top module are transformers' documented API.
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers."):
                    used.update(f"{node.module}.{alias.name}" for alias in node.names)
    listed = set(compat.IMPORTED_INTERNALS)
    assert not used - listed, "add to modeling_kimi3.compat.IMPORTED_INTERNALS"
    assert not listed - used, "no longer imported: remove from modeling_kimi3.compat.IMPORTED_INTERNALS"


def versions(monkeypatch, **installed):
    def version(name):
        if installed[name] is None:
            raise compat.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(compat, "version", version)


@pytest.mark.parametrize("transformers", ["5.24.0", "5.25.0.dev0", "5.99.1"])
def test_supported_versions_pass(monkeypatch, transformers):
    versions(monkeypatch, torch="2.9.0+cpu", transformers=transformers)
    compat.check_versions()


@pytest.mark.parametrize(
    "installed, complaint",
    [
        ({"torch": "2.13.0", "transformers": "5.23.1"}, "transformers 5.23.1 is installed"),
        ({"torch": "2.13.0", "transformers": "6.0.0"}, "transformers 6.0.0 is installed"),
        ({"torch": "2.13.0", "transformers": "6.0.0.dev0"}, "transformers 6.0.0.dev0 is installed"),
        ({"torch": "2.8.1", "transformers": "5.24.0"}, "torch 2.8.1 is installed"),
        ({"torch": None, "transformers": "5.24.0"}, "torch is not installed"),
    ],
)
def test_other_versions_stop_the_import_with_one_sentence(monkeypatch, installed, complaint):
    versions(monkeypatch, **installed)
    with pytest.raises(ImportError) as caught:
        compat.check_versions()
    message = str(caught.value)
    assert complaint in message
    assert "transformers >=5.24,<6" in message and "torch >=2.9" in message
    assert message.endswith(".") and message.count(". ") == 0 and "\n" not in message


def test_old_python_is_refused(monkeypatch):
    monkeypatch.setattr(compat.sys, "version_info", (3, 10, 4))
    with pytest.raises(ImportError, match=r"works with Python >=3\.11"):
        compat.check_versions()
