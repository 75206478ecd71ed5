"""Recorders in the environments of their engines: clean models are equal, and a bug in the engine's weights is found."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from models import LLAMA, llama, written
from safetensors.torch import load_file, save_file

import dovetail
from dovetail.base.errors import FileError
from dovetail.files.spec import from_yaml
from dovetail.proof.compare.engines import engines, interpreter, record_engine

ROOT = Path(__file__).parents[2]


def python_of(engine: str) -> Path:
    ready = ROOT / ".peers" / engine / "ready"
    if not ready.exists():
        pytest.skip(f"bash benchmarks/peers/make {engine}")
    return ready.parent / "bin" / "python"


@pytest.mark.slow
def test_transformers_records_what_verify_calls_equal(tmp_path: Path) -> None:
    ours, theirs = llama(tmp_path)
    result = dovetail.record("transformers", theirs, out=tmp_path / "dump", length=9, steps=2)
    assert (result.passes, result.tokens) == (3, 18)
    verified = dovetail.verify(str(ours), f"dump:{tmp_path / 'dump'}")
    assert verified.status == "equal"
    assert verified.to_dict()["passes"] == {"forward": "equal", "decode B": "equal"}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["mlx", "vllm"])
def test_another_engine_is_equal_and_a_bug_in_it_is_found(tmp_path: Path, engine: str) -> None:
    python = python_of(engine)
    ours, theirs = written(tmp_path, from_yaml(LLAMA).set("layers.*.mixer.head", 32))  # vLLM: no smaller heads on CPU
    assert dovetail.verify(str(ours), f"{engine}:{theirs}", python=python, length=12).status == "equal"
    wrong = tmp_path / "wrong"
    shutil.copytree(theirs, wrong)
    tensors = load_file(theirs / "model.safetensors")
    gate, up = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up"))
    tensors[gate], tensors[up] = tensors[up].clone(), tensors[gate].clone()
    save_file(tensors, wrong / "model.safetensors", metadata={"format": "pt"})
    result = dovetail.verify(str(ours), f"{engine}:{wrong}", python=python, length=12).to_dict()
    assert (result["verdict"], result["layer"], result["cause"]["name"]) == ("structural", "layers.1", "gate and up swapped")


@pytest.mark.slow
def test_llamacpp_is_equal_and_refuses_another_dtype(tmp_path: Path) -> None:
    python = python_of("llama.cpp")
    ours, theirs = written(tmp_path, from_yaml(LLAMA))
    file, script = tmp_path / "model.gguf", ROOT / "benchmarks/peers/write_gguf.py"
    subprocess.run([python, script, theirs, file], check=True, timeout=300)
    assert dovetail.verify(str(ours), f"llamacpp:{file}", python=python, length=12).status == "equal"
    with pytest.raises(FileError, match="ask for float32"):
        record_engine("llamacpp", file, tmp_path / "out", [[1, 2, 3]], steps=1, dtype="bfloat16", python=python)


def test_an_unknown_engine_and_a_missing_interpreter_are_errors(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="not an engine"):
        record_engine("vlm", tmp_path, tmp_path / "out", [[1, 2]], steps=0)
    with pytest.raises(FileError, match="DOVETAIL_VLLM_PYTHON"):
        interpreter("vllm", tmp_path / "none")
    assert "transformers" in engines()


@pytest.mark.slow
def test_a_recorder_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileError, match="recorder failed"):
        record_engine("transformers", tmp_path / "empty", tmp_path / "out", [[1, 2, 3]], steps=1)
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_the_prompt_must_be_longer_than_its_steps(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no token for the first pass"):
        record_engine("transformers", tmp_path, tmp_path / "out", [torch.arange(3).tolist()], steps=3)
