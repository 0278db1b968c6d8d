"""Which backend runs, and what is said about the others."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch

from paged_kv.attention import select
from paged_kv.attention.base import AttentionOptions, Backend
from paged_kv.attention.cpu import build
from tests.attention.oracle import Shape, attend_exactly, problem, without_nan

OPTIONS = AttentionOptions(scale=0.125)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "why_not", lambda: 'no C++ compiler "c++" on PATH')
    monkeypatch.setattr(select, "_warned", False)


def test_auto_on_the_cpu_is_the_kernel_with_sdpa_behind_it() -> None:
    if build.why_not() is not None:
        pytest.skip(str(build.why_not()))
    backend = select.pick_backend("cpu")
    assert backend.name == "cpu"
    query, view = problem(Shape(), [40, 7], [2, 1])
    torch.testing.assert_close(
        backend.attend(query, view, OPTIONS).double(), attend_exactly(query, view, OPTIONS), rtol=0, atol=1e-5
    )


def test_a_call_that_the_kernel_cannot_run_goes_to_sdpa_and_the_reason_is_given() -> None:
    backend = select.pick_backend("cpu")
    assert isinstance(backend, select.FirstThatCan)
    query, view = problem(Shape(dtype=torch.float64), [40])
    chosen, passed = backend.choose(query, view, OPTIONS)
    assert chosen.name == "sdpa"
    assert any("float64" in reason for reason in passed) or build.why_not() is not None
    assert backend.unsupported(query, view, OPTIONS) is None
    out = backend.attend(query, without_nan(view), OPTIONS)
    torch.testing.assert_close(out, attend_exactly(query, view, OPTIONS))


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_sdpa_runs_after_one_warning() -> None:
    with pytest.warns(RuntimeWarning, match="no C\\+\\+ compiler") as caught:
        assert select.pick_backend("cpu").name == "sdpa"
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        select.pick_backend("cpu")


@pytest.mark.usefixtures("no_compiler")
def test_a_backend_asked_for_by_name_raises_with_the_reason_when_it_cannot_run() -> None:
    with pytest.raises(select.NoBackend, match="no C\\+\\+ compiler") as caught:
        select.pick_backend("cpu", name="cpu")
    assert caught.value.name == "cpu"
    with pytest.raises(select.NoBackend, match="the names are auto, cpu, varlen, triton, sdpa"):
        select.pick_backend("cpu", name="flash")


def test_sdpa_can_be_asked_for() -> None:
    backend = select.pick_backend("cpu", name="sdpa")
    assert backend.name == "sdpa"
    assert isinstance(backend, Backend)


def test_every_backend_is_listed_with_a_reason() -> None:
    rows = select.available_backends("cpu")
    assert [name for name, _, _ in rows] == ["cpu", "varlen", "triton", "sdpa"]
    assert all(reason for _, _, reason in rows)
    assert rows[-1] == ("sdpa", True, "runs on cpu")
    assert not rows[1][1]


def test_building_ahead_gives_the_library_that_is_used() -> None:
    if build.why_not() is not None:
        pytest.skip(str(build.why_not()))
    library = select.build()
    assert library.exists()
    assert library == build.load()


def test_a_missing_or_failing_compiler_is_an_error_with_its_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.KernelUnavailable, match="no-such-compiler"):
        build.build()
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(build.KernelUnavailable, match="false failed"):
        build.build()


def test_importing_the_choice_imports_no_gpu_kernels() -> None:
    code = "import sys, paged_kv.attention.select; print([m for m in sys.modules if 'attention.gpu' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
