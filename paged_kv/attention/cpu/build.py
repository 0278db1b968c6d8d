"""Compiling the C++ kernel on first use, and loading it as `torch.ops.paged_kv`.

Owns: the compiler call, where the library is kept, its key, the fake kernels that torch.compile needs.
Does not know: backends, views.

The toolchain is that of `torch.utils.cpp_extension` (its compiler, its include, library and cache folders), but the
compiler is called directly: that needs neither ninja nor Python's headers, only a C++ compiler.
`PAGED_KV_CXXFLAGS` adds flags of one's own, `-DPAGED_KV_VECTOR_BYTES=16` for instance.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.utils import cpp_extension

from allocator import KVError

SOURCES = Path(__file__).parent / "csrc"
FLAGS = (
    "-shared",
    "-fPIC",
    "-std=c++20",
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
)
_log = logging.getLogger(__name__)


class KernelUnavailable(KVError):
    """Raised when the C++ kernel cannot be built or loaded; use another backend, or do what the reason says.

    Attributes:
        reason: What is missing or went wrong, with the end of the compiler's output if it was called.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"the fused CPU kernel is not available: {reason}")
        self.reason = reason


def build() -> Path:
    """Compile the kernel if its library is not there yet; takes about half a minute then.

    Returns:
        The library. Its name carries a hash of all that it depends on: sources, flags, torch, compiler, processor.

    Raises:
        KernelUnavailable: No compiler, or it fails.
    """
    name = str(cpp_extension.get_cxx_compiler())  # type: ignore[no-untyped-call]
    compiler = shutil.which(name)
    if compiler is None:
        raise KernelUnavailable(f'no C++ compiler "{name}" on PATH: install g++ or set CXX')
    flags = [*FLAGS, *shlex.split(os.environ.get("PAGED_KV_CXXFLAGS", "")), *_environment_flags()]
    folder = Path(cpp_extension._get_build_directory("paged_kv", False))
    library = folder / f"paged_kv-{_key(compiler, flags)}.so"
    if not library.exists():
        _compile(compiler, flags, library)
    return library


def _environment_flags() -> list[str]:
    """Where torch's headers and libraries are, and the OpenMP library that torch itself has loaded.

    Another OpenMP library would bring a second pool of threads, and the two would fight over the same cores.
    """
    flags = [f"-isystem{path}" for path in cpp_extension.include_paths()]
    flags += ["-fopenmp", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    for path in cpp_extension.library_paths():
        flags += [f"-L{path}", f"-Wl,-rpath,{path}"]
    return [*flags, "-ltorch", "-ltorch_cpu", "-lc10", *(str(path) for path in _openmp_libraries())]


def _openmp_libraries() -> list[Path]:
    folder = Path(torch.__file__).parent
    return sorted([*folder.glob("lib/libgomp*.so*"), *folder.parent.glob("torch.libs/libgomp*.so*")])[:1]


def _key(compiler: str, flags: Sequence[str]) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.sha256()
    for part in [torch.__version__, compiler, version, platform.machine(), _processor(), *flags]:
        digest.update(part.encode() + b"\0")
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """What `-march=native` depends on: the processor's features, as far as the system tells."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()


def _compile(compiler: str, flags: Sequence[str], library: Path) -> None:
    """Compile into a file of this process and rename it: whoever builds at the same time gets a whole library too."""
    _log.info("compiling the fused CPU attention kernel into %s (once for this machine)", library)
    partial = library.with_suffix(f".{os.getpid()}.partial")
    command = [compiler, str(SOURCES / "ops.cpp"), "-o", str(partial), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        partial.unlink(missing_ok=True)
        raise KernelUnavailable(f"{compiler} failed:\n{done.stderr[-2000:]}")
    partial.replace(library)


@functools.cache
def load() -> Path:
    """Build if needed and load the kernel: `torch.ops.paged_kv.attend` and `.write` exist afterwards.

    Raises:
        KernelUnavailable: It cannot be built, or the library cannot be loaded.
    """
    library = build()
    try:
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise KernelUnavailable(f"{library} does not load: {error}") from error
    torch.library.register_fake("paged_kv::attend", _fake_attend)
    torch.library.register_fake("paged_kv::write", _fake_write)
    torch.library.register_fake("paged_kv::linear", _fake_linear)
    torch.library.register_fake("paged_kv::mlp", _fake_mlp)
    torch.library.register_fake("paged_kv::qkv", _fake_qkv)
    torch.library.register_fake("paged_kv::rms_norm", _fake_norm)
    return library


def _fake_attend(query: Tensor, keys: Tensor, values: Tensor, *others: object) -> Tensor:
    _require_one_device(query, keys, values, *others)
    return query.new_empty((query.shape[0], query.shape[1], values.shape[3]))


def _fake_write(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    _require_one_device(keys, values, key, value, slots)


def _fake_linear(x: Tensor, packed: Tensor, bias: Tensor | None, columns: int) -> Tensor:
    _require_one_device(x, packed, bias)
    return x.new_empty((*x.shape[:-1], columns))


def _fake_mlp(x: Tensor, *others: object) -> Tensor:
    _require_one_device(x, *others)
    return x.new_empty((*x.shape[:-1], cast(int, others[-1])))


def _fake_qkv(x: Tensor, *others: object) -> tuple[Tensor, Tensor, Tensor]:
    _require_one_device(x, *others)
    queries, keys, values = (x.new_empty((*x.shape[:-1], columns)) for columns in cast(list[int], others[-1]))
    return queries, keys, values


def _fake_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    _require_one_device(x, weight)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _require_one_device(*arguments: object) -> None:
    devices = sorted({str(t.device) for t in arguments if isinstance(t, Tensor)})
    if len(devices) > 1:
        raise ValueError(f"paged_kv: all tensors must be on one device, but are on {', '.join(devices)}")


@functools.cache
def why_not() -> str | None:
    """None if the kernel is loaded (builds and loads it at the first call), else why it is not."""
    try:
        load()
    except KernelUnavailable as error:
        return error.reason
    return None
