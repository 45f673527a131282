"""The wheel: what it holds, and that it works away from this repository."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from the tree as it is, in the environment that runs the tests."""
    directory = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(directory),
        str(ROOT),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = directory.glob("*.whl")
    return built


def test_contents(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in (
        "modeling_kimi3/__init__.py",
        "modeling_kimi3/py.typed",
        "kimi3_kernels/kda.py",
        "kimi3_kernels/csrc/kda_step.cpp",
        "kimi3_eval/cli.py",
        "kimi3_eval/tasks/niah_single_1.yaml",
        "kimi3_eval/data/moby_dick.txt.xz",
    ):
        assert name in names, name
    # Nothing of the folders' own names, which belong to other packages in site-packages.
    assert not {name.split("/")[0] for name in names} & {"kernels", "eval", "conversion", "tests"}
    assert any(name.endswith("LICENSE") for name in names)


def test_installed_away_from_the_repository(wheel, golden, tmp_path):
    """Unpacked alone on the path, as an install leaves it, it registers and loads a released checkpoint."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = (
        "import modeling_kimi3, torch; from transformers import AutoModelForCausalLM;"
        f"assert modeling_kimi3.__file__.startswith({str(tmp_path)!r});"
        f"model = AutoModelForCausalLM.from_pretrained({str(golden('k3-tiny-vision'))!r}, dtype=torch.float32);"
        "print(type(model).__name__, tuple(model(torch.tensor([[7, 8, 9]])).logits.shape))"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "HF_HUB_OFFLINE": "1"}
    # -P and an empty folder keep the repository itself off the path; site-packages come after PYTHONPATH.
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "KimiK3ForCausalLM (1, 3, 256)"
