"""What is installed, exported and documented: public names, layering, files in the wheel, code in the README."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
README_CODE = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)


def _run(code: str, **environment: str) -> str:
    """Run code in a fresh interpreter; its output."""
    import os

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("package", ["allocator", "paged_kv"])
def test_every_public_name_exists_and_is_listed_once(package: str):
    module = importlib.import_module(package)
    assert len(module.__all__) == len(set(module.__all__))
    for name in module.__all__:
        assert getattr(module, name) is not None, name


def test_an_unknown_public_name_is_an_attribute_error():
    import paged_kv

    with pytest.raises(AttributeError, match="no_such_name"):
        paged_kv.no_such_name  # noqa: B018


def test_the_version_is_the_distributions():
    from importlib.metadata import version

    import paged_kv

    assert paged_kv.__version__ == version("paged-kv")


def test_the_allocator_imports_numpy_and_the_standard_library_only():
    for path in sorted((ROOT / "allocator").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, path
                names = [node.module or ""]
            for name in names:
                top = name.split(".")[0]
                assert top in {"numpy", "allocator"} or top in sys.stdlib_module_names, f"{path}: {name}"


def test_importing_the_allocator_loads_no_torch():
    loaded = _run("import sys, allocator; print('torch' in sys.modules, 'transformers' in sys.modules)")
    assert loaded.split() == ["False", "False"]


def test_importing_the_scheduler_loads_no_model_code():
    """Its own imports; the package's front does load torch."""
    for name in ("plan", "queue", "request", "scheduler"):
        tree = ast.parse((ROOT / "paged_kv" / "engine" / f"{name}.py").read_text())
        imported = {
            alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
        }
        imported |= {(node.module or "").split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not imported & {"torch", "transformers"}


def test_every_room_has_its_place_in_the_layering_contract():
    """A module that no contract names would be free to import anything: add it to `layers` in pyproject.toml."""
    [contract] = [c for c in PROJECT["tool"]["importlinter"]["contracts"] if c["type"] == "layers"]
    named = set(re.findall(r"paged_kv\.(\w+)", " ".join(contract["layers"])))
    there = {
        path.stem for path in (ROOT / "paged_kv").iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    assert there - {"__init__"} <= named


def test_importing_changes_nothing_in_transformers_but_its_own_names():
    before_after = _run(
        """
import json, threading
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
def state():
    registries = ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS
    return [{name: str(registry[name]) for name in registry} for registry in registries]
before = state()
threads = threading.active_count()
import paged_kv
print(json.dumps([before, state(), threading.active_count() - threads]))
"""
    )
    before, after, new_threads = json.loads(before_after.splitlines()[-1])
    for was, now in zip(before, after, strict=True):
        assert {name: now[name] for name in was} == was
        assert all(name.startswith("paged_kv") for name in set(now) - set(was))
    assert new_threads == 0


def test_the_command_is_installed():
    from importlib.metadata import entry_points

    [command] = [entry for entry in entry_points(group="console_scripts") if entry.name == "paged-kv"]
    assert callable(command.load())


@pytest.mark.slow
def test_the_wheel_is_pure_and_holds_sources_and_markers(tmp_path: Path):
    pytest.importorskip("setuptools", minversion="77")
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(ROOT),
    ]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [wheel] = tmp_path.glob("*.whl")
    assert wheel.name.endswith("py3-none-any.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for package in ("allocator", "paged_kv"):
        sources = {
            path.relative_to(ROOT).as_posix()
            for path in (ROOT / package).rglob("*")
            if path.suffix in (".py", ".cpp", ".h") or path.name == "py.typed"
        }
        assert sources <= names
    assert not [name for name in names if name.startswith(("tests/", "bench/"))]
    assert any(name.endswith("LICENSE") for name in names)


def test_constraints_pin_releases_that_the_ranges_allow():
    from packaging.requirements import Requirement
    from packaging.version import Version

    ranges = {
        requirement.name: requirement.specifier for requirement in map(Requirement, PROJECT["project"]["dependencies"])
    }
    for file in ("constraints.txt", "constraints-floor.txt"):
        for line in (ROOT / file).read_text().splitlines():
            if line and not line.startswith("#"):
                pin = Requirement(line)
                [exact] = list(pin.specifier)
                assert Version(exact.version) in ranges.get(pin.name, pin.specifier), f"{file}: {line}"


def test_example_prompts_are_what_the_command_reads():
    lines = [json.loads(line) for line in (ROOT / "examples" / "prompts.jsonl").read_text().splitlines()]
    assert len(lines) >= 16
    assert all(("prompt" in line) != ("messages" in line) for line in lines)
    assert any("temperature" in line for line in lines)
    long = [line for line in lines if len(json.dumps(line)) > 1200]
    assert len(long) >= 4  # several hundred tokens: a per-layer budget bites


@pytest.mark.weights
@pytest.mark.slow
@pytest.mark.parametrize("code", README_CODE, ids=lambda code: code.splitlines()[1])
def test_the_readmes_code_runs(code: str):
    assert _run(code).strip()


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_links_between_documents_lead_somewhere(page: str):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), f"{page}: {target}"
