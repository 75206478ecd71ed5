"""The product of few rows with W as it is stored: a kernel in C++ for processors with AMX, compiled once on this machine.

    torch.ops.dovetail.few_rows_linear(x, codes, scale, zero, bits)        x Wᵀ (rows, out); few_rows.cpp says how

The kernel reads each byte of W once, so that fewer bits take less time, for any number of rows. It is compiled when it is first
used, which takes some seconds, and kept in $XDG_CACHE_HOME/dovetail (by default ~/.cache/dovetail); its name there has the hash
of its source, of torch and of the compiler. Native code is loaded from there only if the directory and the file belong to this
user and no other can write to them. `state` says why the kernel is not used; torch's kernels are then (formats/kernels.py).

Shapes: x (rows, inp), codes (out, bytes) -> (rows, out).
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_suffix(".cpp")
FEATURES = ("f", "bw", "dq", "vl", "vnni", "bf16")  # of AVX-512
FLAGS = (
    *("-std=c++20", "-O3", "-shared", "-fPIC", "-mfma", "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
    *(f"-mavx512{feature}" for feature in FEATURES),
    "-DTORCH_TARGET_VERSION=0x020a000000000000",  # of torch's stable interface: 2.10
)
SECONDS = 300  # for the compiler
_state: str | None = None  # a variable, which a graph that is traced reads


def ready() -> bool:
    """Whether the kernel can be called. The first call on a machine compiles it."""
    return not state()


def state() -> str:
    """Why the kernel is not used; empty if it is ready."""
    global _state
    if _state is None:
        _state = _made_ready()
    return _state


def _made_ready() -> str:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"it is written for Linux on x86-64, and this is {sys.platform} on {platform.machine()}"
    if not (torch.cpu._is_amx_tile_supported() and torch.cpu._is_avx512_bf16_supported() and torch.cpu._is_vnni_supported()):
        return "the processor has no AMX"
    compiler = shutil.which(os.environ.get("CXX") or "g++")
    if compiler is None:
        return "there is no C++ compiler; install g++, or name one in CXX"
    try:
        library = _compiled(compiler)
        if not torch.cpu._init_amx():
            return "the system does not grant the state of AMX"
        torch.ops.load_library(library)
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        return f"it could not be compiled or loaded: {error}"
    torch.library.register_fake("dovetail::few_rows_linear", _shape)
    return ""


def _shape(x: Tensor, codes: Tensor, scale: Tensor | None, zero: Tensor | None, bits: int) -> Tensor:
    return x.new_empty(x.shape[0], codes.shape[0])


def _compiled(compiler: str) -> Path:
    """The path of the library, which is compiled unless it is there."""
    said = subprocess.run([compiler, "--version"], capture_output=True, timeout=SECONDS, check=True).stdout
    key = hashlib.sha256(b"\0".join([SOURCE.read_bytes(), " ".join(FLAGS).encode(), torch.__version__.encode(), said]))
    directory = _directory()
    path = directory / f"few_rows-{key.hexdigest()[:32]}.so"
    if not path.is_symlink() and path.exists() and _of_this_user(path):
        return path
    root = Path(torch.__file__).parent
    descriptor, draft = tempfile.mkstemp(suffix=".so", dir=directory)
    os.close(descriptor)
    command = [compiler, *FLAGS, f"-I{root / 'include'}", str(SOURCE), "-o", draft, f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().partition("\n")[0] or f"{compiler} ended with exit code {done.returncode}")
        os.chmod(draft, 0o700)
        os.replace(draft, path)  # two processes may compile it at once
    finally:
        Path(draft).unlink(missing_ok=True)
    return path


def _directory() -> Path:
    """The user's own cache directory, mode 0700."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    directory = (base if base.is_absolute() else Path.home() / ".cache") / "dovetail"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.is_symlink() or not _of_this_user(directory):
        raise PermissionError(f"{directory}: belongs to another user or can be written by others; chmod 700 it")
    return directory


def _of_this_user(path: Path) -> bool:
    status = path.lstat()
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
