"""The sdist and the wheel, as a user meets them: built, installed in a new environment, verbs run from an empty directory."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tarfile
import time
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from dovetail import __version__
from dovetail.cli import VERBS
from verbs import CODES, RUNS, STDIN, write_inputs

ROOT = Path(__file__).parents[1]
TORCH = ["torch==2.13.0", *(["--index-url", os.environ["TORCH_INDEX"]] if os.environ.get("TORCH_INDEX") else [])]
INSTALL_SECONDS = 20  # of CPU time, for the wheel and what it needs besides torch
# exit codes of verbs that need what the wheel does not bring: transformers, the extras `serve` and `plots`; each says so
MISSING = {"record": (4, "dovetail-lm[hf]"), "serve": (2, "dovetail-lm[serve]"), "map": (4, "dovetail-lm[plots]")}
OTHER_PYTHONS = ("3.12", "3.13")


class Environment(NamedTuple):
    """The directory of its programs, and what `pip install WHEEL` took after torch."""

    programs: Path
    cpu_seconds: float
    seconds: float


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the sdist, and the wheel that is made from it."""
    home = tmp_path_factory.mktemp("built")
    venv.create(home / "builder", with_pip=True)
    python = str(home / "builder/bin/python")
    _run(home, python, "-m", "pip", "install", "-q", "hatchling")
    _run(ROOT, python, "-m", "hatchling", "build", "-t", "sdist", "-d", str(home))
    (sdist,) = home.glob("*.tar.gz")
    _run(home, python, "-m", "pip", "wheel", str(sdist), "--no-deps", "-q", "-w", str(home))
    return home


@pytest.fixture(scope="module")
def environment(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A new environment with torch and the wheel, nothing else."""
    home = tmp_path_factory.mktemp("wheel")
    venv.create(home / "env", with_pip=True)
    python = str(home / "env/bin/python")
    _run(home, python, "-m", "pip", "install", "-q", *TORCH)
    cpu, start = _cpu_seconds(), time.monotonic()
    _run(home, python, "-m", "pip", "install", "-q", str(_wheel(built)))
    return Environment(home / "env/bin", _cpu_seconds() - cpu, time.monotonic() - start)


def _wheel(built: Path) -> Path:
    (wheel,) = built.glob("*.whl")
    return wheel


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _run(folder: Path, *command: str, **env: str) -> str:
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=plain | env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_sdist_and_wheel_have_the_name_and_the_files(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    assert sdist.name == f"dovetail_lm-{__version__}.tar.gz"
    assert _wheel(built).name == f"dovetail_lm-{__version__}-py3-none-any.whl"
    source = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src/dovetail").rglob("*") if path.is_file()}
    source = {name for name in source if "__pycache__" not in name}
    recipes = {f"dovetail/recipes/{path.name}" for path in (ROOT / "recipes").glob("*.py")}
    assert len(recipes) > 1
    book = {"dovetail/book/exercises.yaml", "dovetail/book/index.md"}
    with zipfile.ZipFile(_wheel(built)) as archive:
        names = set(archive.namelist())
    assert {name for name in names if name.startswith("dovetail/")} == source | recipes | book
    assert not [name for name in names if name.startswith(("checks/", "tests/"))], (
        "our numbers and seeded bugs are not for users"
    )
    assert {f"dovetail_lm-{__version__}.dist-info/licenses/LICENSE"} <= names
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in source} <= inside
    assert {"tests/test_wheel.py", "docs/index.md", "pyproject.toml", "LICENSE", ".ci/run"} <= inside


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_container_has_what_the_wheel_needs(built: Path, tmp_path: Path) -> None:
    """The files that deploy/Containerfile copies make the same wheel."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("src", "recipes"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "docs/book").mkdir(parents=True)
    for name in ("docs/book/exercises.yaml", "docs/book/index.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    _run(tmp_path, sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "-q", "-w", "wheels")
    with zipfile.ZipFile(tmp_path / "wheels" / _wheel(built).name) as small, zipfile.ZipFile(_wheel(built)) as full:
        assert {item.filename: item.CRC for item in small.infolist()} == {item.filename: item.CRC for item in full.infolist()}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_core_installs_soon_and_brings_no_extra(environment: Environment) -> None:
    python = str(environment.programs / "python")
    print(f"pip install: {environment.cpu_seconds:.1f} s of CPU time, {environment.seconds:.1f} s in all")
    assert environment.cpu_seconds < INSTALL_SECONDS
    assert "No broken requirements" in _run(environment.programs, python, "-m", "pip", "check")
    installed = {
        line.partition("==")[0].lower() for line in _run(environment.programs, python, "-m", "pip", "freeze").splitlines()
    }
    assert not installed & {"transformers", "matplotlib", "pyarrow", "ray", "fastapi", "llguidance", "pytest", "sphinx"}


def _interpreters(version: str) -> Iterator[str]:
    yield from filter(None, [shutil.which(f"python{version}")])
    yield from map(str, sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python")))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", OTHER_PYTHONS)
def test_without_torch_on_other_pythons(version: str, built: Path, tmp_path: Path) -> None:
    """Every file compiles without a warning, the other requirements install, and --help answers. No model runs."""
    ask = [sys.executable, "-c", "0"]
    for interpreter in _interpreters(version):
        ask = [interpreter, "-c", f"import sys, venv; sys.exit(not sys.version.startswith('{version}.'))"]
        if subprocess.run(ask, capture_output=True, check=False).returncode == 0:
            break
    else:
        pytest.skip(f"no Python {version} here")
    _run(tmp_path, ask[0], "-m", "venv", "env")
    python = str(tmp_path / "env/bin/python")
    needs = [line for line in _requirements(built) if not line.startswith("torch")]
    assert len(needs) == 6
    _run(tmp_path, python, "-m", "pip", "install", "-q", *needs)
    _run(tmp_path, python, "-m", "pip", "install", "-q", "--no-deps", str(_wheel(built)))
    (package,) = (tmp_path / "env").glob("lib/python*/site-packages/dovetail")
    _run(tmp_path, python, "-W", "error", "-m", "compileall", "-q", "-f", str(package))
    dovetail = str(tmp_path / "env/bin/dovetail")
    assert __version__ in _run(tmp_path, dovetail, "--version")
    assert "usage: dovetail show" in _run(tmp_path, dovetail, "show", "--help")


def _requirements(built: Path) -> list[str]:
    with zipfile.ZipFile(_wheel(built)) as archive:
        lines = archive.read(f"dovetail_lm-{__version__}.dist-info/METADATA").decode().splitlines()
    return [
        line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ") and "extra ==" not in line
    ]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_verb_runs_from_an_empty_folder(environment: Environment, tmp_path: Path) -> None:
    assert set(RUNS) == set(VERBS), "every verb is run"
    write_inputs(tmp_path)
    env = {
        "PATH": f"{environment.programs}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
    }
    for verb, args in RUNS.items():
        code, message = MISSING.get(verb, (CODES.get(verb, 0), ""))
        command = [str(environment.programs / "dovetail"), *verb.split(), *args]
        done = subprocess.run(
            command, cwd=tmp_path, env=env, input=STDIN, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == code, f"{verb}: {done.stderr[-2000:]}{done.stdout[-500:]}"
        assert "Traceback" not in done.stderr
        assert message in done.stderr


MODULE = """
import torch

def factory():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(40, 16), torch.nn.Linear(16, 40))
"""
TEST = "def test_nothing() -> None:\n    pass\n"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_laws_run_without_the_repository(environment: Environment, tmp_path: Path) -> None:
    """On a spec, on a kind of another package with an oracle and one without, on an nn.Module, and in pytest."""
    for name in ("ema.py", "ema.yaml"):
        shutil.copy(ROOT / "docs/examples" / name, tmp_path / name)
    bare = (tmp_path / "ema.py").read_text(encoding="utf-8").partition('@oracle("ema")')[0]
    (tmp_path / "bare.py").write_text(bare, encoding="utf-8")
    (tmp_path / "model.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "test_model.py").write_text(TEST, encoding="utf-8")
    dovetail, python = str(environment.programs / "dovetail"), str(environment.programs / "python")
    few = ("--only", "causal", "chunked", "padded")
    _run(tmp_path, dovetail, "laws", "llama-tiny", "--seeds", "1", *few)
    _run(tmp_path, dovetail, "laws", "ema.yaml", "--load", "ema.py", "--seeds", "1", *few)
    _run(tmp_path, dovetail, "laws", "py:model.py:factory", "--only", "causal", "padded")
    _run(tmp_path, dovetail, "laws", "--quick", "--only", "own_number", "--load", "ema.py")
    missing = [dovetail, "laws", "--quick", "--only", "own_number", "--load", "bare.py"]
    done = subprocess.run(missing, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 1
    assert "ema, law 14: has no oracle" in done.stdout
    _run(tmp_path, python, "-m", "pip", "install", "-q", "pytest")
    out = _run(
        tmp_path, python, "-m", "pytest", "-q", "--dovetail", "py:model.py:factory", "-k", "causal or nothing", "test_model.py"
    )
    assert "2 passed" in out
