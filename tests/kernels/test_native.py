"""The optional C++ decode step against the plain torch one. Built once per session; skipped without a compiler."""

import shutil

import pytest
import torch

from kimi3_kernels import kda_step, l2norm, native


@pytest.fixture(scope="module")
def built():
    if shutil.which("c++") is None or shutil.which("ninja") is None:
        pytest.skip("no C++ compiler or ninja here: the plain torch form is what runs")
    before = native._built
    assert native.build()
    yield
    native._built = before


@pytest.mark.parametrize("batch, heads, key, value", [(1, 1, 1, 1), (1, 3, 32, 32), (2, 2, 40, 24), (3, 5, 128, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_plain_torch(built, monkeypatch, batch, heads, key, value, dtype):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    state = draw(batch, heads, key, value)
    results = []
    for own in (False, True):
        monkeypatch.setattr(native, "_built", own)
        held, outputs = state.clone(), []
        generator.manual_seed(1)
        for _ in range(4):
            q, k = l2norm(draw(batch, heads, key)), l2norm(draw(batch, heads, key))
            v, g, beta = (
                draw(batch, heads, value).to(dtype),
                -5 * draw(batch, heads, key).abs(),
                draw(batch, heads).sigmoid(),
            )
            outputs.append(kda_step(q, k, v, g, beta, held))
        results.append((torch.stack(outputs), held))
    assert results[1][0].dtype == dtype
    torch.testing.assert_close(
        results[1][0].float(), results[0][0].float(), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
    )
    torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-5, atol=1e-5)


def test_other_inputs_stay_with_torch(built, monkeypatch):
    monkeypatch.setattr(native, "_built", True)
    assert native.takes_kda_step(torch.zeros(1, 1, 2, 2))
    assert not native.takes_kda_step(torch.zeros(1, 1, 2, 2, dtype=torch.float64))


def test_subnormals_survive_the_library(built):
    """Compiling with fast-math would flush them to zero everywhere in the process."""
    assert torch.tensor(1e-40).mul(0.5).item() > 0


def test_a_failing_build_is_said_once(monkeypatch):
    import torch.utils.cpp_extension

    def fail(*args, **kwargs):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(native, "_built", None)
    monkeypatch.setattr(torch.utils.cpp_extension, "load", fail)
    with pytest.warns(UserWarning, match="could not be built, plain torch is used"):
        assert native.build() is False
    assert native.build() is False
