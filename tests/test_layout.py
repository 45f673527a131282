"""The layout of the tree: who may import whom, and which folders must stay plain folders."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "modeling_kimi3": ROOT / "modeling_kimi3",
    "kimi3_kernels": ROOT / "kernels" / "kimi3_kernels",
    "kimi3_conversion": ROOT / "conversion" / "kimi3_conversion",
    "kimi3_eval": ROOT / "eval" / "kimi3_eval",
}
# What each package may import of the others; nothing imports the last two.
ALLOWED = {
    "kimi3_kernels": set(),
    "modeling_kimi3": {"kimi3_kernels"},
    "kimi3_conversion": {"modeling_kimi3", "kimi3_kernels"},
    "kimi3_eval": {"modeling_kimi3", "kimi3_kernels"},
}


def imported(file: Path, module_level_only: bool = False) -> set[str]:
    """Top-level names of the modules that a file imports absolutely."""
    tree = ast.parse(file.read_text())
    nodes = tree.body if module_level_only else ast.walk(tree)
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("folder", ["kernels", "conversion", "eval", "tests"])
def test_folders_that_must_not_be_packages(folder):
    """With an `__init__.py`, a folder named `kernels` at the root hides HF's package of that name and breaks
    transformers' import for everyone who starts Python there."""
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize("package", PACKAGES)
def test_layers(package):
    for file in PACKAGES[package].rglob("*.py"):
        others = imported(file) & set(PACKAGES) - {package}
        assert others <= ALLOWED[package], f"{file.relative_to(ROOT)} imports {others - ALLOWED[package]}"


def test_kernels_need_torch_only():
    for file in PACKAGES["kimi3_kernels"].rglob("*.py"):
        foreign = imported(file, module_level_only=True) - set(sys.stdlib_module_names) - {"torch", "kimi3_kernels"}
        assert not foreign, f"{file.relative_to(ROOT)} imports {foreign}"


def test_transformers_imports_from_the_root_with_hf_kernels_installed(tmp_path):
    """transformers asks the metadata whether HF's `kernels` is there and then imports names from it; started at the
    root of this repository, it must find that package and not our folder."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("MARK = 'the installed one'\n")
    info = tmp_path / "kernels-0.18.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n")
    code = "import kernels; assert kernels.MARK; import transformers; print(transformers.__version__)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_the_kernels_imports_no_accelerator_package():
    code = (
        "import sys, kimi3_kernels;"
        "assert not {'triton', 'fla'} & set(sys.modules), sorted({'triton', 'fla'} & set(sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "kernels")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
