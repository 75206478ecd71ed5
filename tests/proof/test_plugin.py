"""The pytest plugin, in a separate pytest process on a user's own files."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MODEL = Path(__file__).parent / "foreign_model.py"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    shutil.copy(MODEL, tmp_path / "model.py")
    (tmp_path / "test_own.py").write_text("import sys\n\n\ndef test_own():\n    assert 'torch' not in sys.modules\n")
    return tmp_path


def run(where: Path, *args: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "error", *args]
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout + done.stderr


def test_unused_it_imports_no_torch(repository: Path) -> None:
    code, out = run(repository, "-q")
    assert code == 0, out
    assert "1 passed" in out


@pytest.mark.slow
def test_each_law_is_an_item(repository: Path) -> None:
    code, out = run(repository, "--dovetail", "py:model.py:position", "-v", "-k", "causal or chunked")
    assert code == 1, out
    assert "position::causal PASSED" in out
    assert "position::chunked FAILED" in out
    assert "the law chunked does not hold: step by step: first differ at row 0, position 1" in out
    assert "collected 7 items / 5 deselected / 2 selected" in out
    assert "1 failed, 1 passed" in out


@pytest.mark.slow
def test_settings_name_models_and_laws_that_do_not_apply_are_skipped(repository: Path) -> None:
    (repository / "pytest.ini").write_text("[pytest]\ndovetail =\n    py:model.py:Stateless\n")
    code, out = run(repository, "-v", "-rs", "-k", "chunked")
    assert code == 0, out
    assert "1 skipped" in out
    assert "it returns no cache that it also takes as an argument" in out


@pytest.mark.slow
def test_an_empty_folder_with_a_package_needs_no_conftest(tmp_path: Path) -> None:
    """A folder with a package and nothing else, and the console script, which does not put the folder on sys.path."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    shutil.copy(MODEL, tmp_path / "package" / "models.py")
    script = "import sys; sys.path = [p for p in sys.path if p]; import pytest; sys.exit(pytest.main())"
    sides = ("py:package.models:leak", "py:package.models:absent", "py:package.nowhere:leak")
    command = [sys.executable, "-c", script, "-p", "no:cacheprovider", "-v", "-k", "causal"]
    command += [word for side in sides for word in ("--dovetail", side)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    out = done.stdout + done.stderr
    assert done.returncode == 1, out
    assert "FAILED dovetail::py:package.models:leak::causal - " in out
    assert "py:package.models:leak: the law causal does not hold: outputs before token 1" in out
    assert "no later token changes an earlier output; again: dovetail laws py:package.models:leak --only causal" in out
    assert "cannot be opened: package.models: has no function called absent" in out
    assert "cannot be opened: package.nowhere: ModuleNotFoundError" in out
    assert "Traceback" not in out
    assert "3 failed" in out
