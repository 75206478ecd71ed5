"""A directory that transformers opens follows our rules: regular files, no link out, safetensors only, no code."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from models import llama
from safetensors.torch import load_file

from dovetail.base.errors import FileError
from dovetail.cli import main
from dovetail.proof.compare.transformers_side import TransformersSide
from dovetail.proof.foreign.opening import opened


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("source"))[1]


@pytest.fixture
def place(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "copy"))


def link_out(place: Path) -> None:
    outside = place.parent / "outside.safetensors"
    (place / "model.safetensors").rename(outside)
    (place / "model.safetensors").symlink_to(outside)


def pickle_only(place: Path) -> None:
    torch.save(load_file(place / "model.safetensors"), place / "pytorch_model.bin")
    (place / "model.safetensors").unlink()


def pipe(place: Path) -> None:
    os.mkfifo(place / "special_tokens_map.json")  # a file that only transformers reads


def adapter(place: Path) -> None:
    (place / "adapter_config.json").write_text('{"base_model_name_or_path": "/elsewhere"}')


def nested_code(place: Path) -> None:
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, "text_config": {"auto_map": {"AutoModel": "evil.Model"}}}))


def kernel(place: Path) -> None:
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, "_attn_implementation": "kernels-community/evil"}))


def shard_outside(place: Path) -> None:
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "../outside.safetensors"}}))


def pickled_shard(place: Path) -> None:
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "weights.bin"}}))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (link_out, "link out of the directory"),
        (pickle_only, "is a pickle"),
        (pipe, "not a regular file"),
        (adapter, "names another model"),
        (nested_code, r"text_config\.auto_map"),
        (kernel, "names a kernel to download"),
        (shard_outside, "is a path"),
        (pickled_shard, r"is not a \.safetensors file"),
    ],
)
def test_transformers_is_not_handed_a_directory_that_breaks_a_rule(place: Path, change: object, reason: str) -> None:
    assert callable(change)
    change(place)
    with pytest.raises(FileError, match=reason):
        TransformersSide(place)
    with pytest.raises(FileError, match=reason):
        opened(f"hf:{place}")


def test_without_weights_verify_refuses_and_laws_says_that_they_are_random(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "model.safetensors").unlink()
    with pytest.raises(FileError, match="random weights cannot be verified"):
        TransformersSide(place)
    with pytest.raises(SystemExit):
        main(["laws", f"hf:{place}", "--only", "causal"])
    assert "the directory holds no weights: they are random" in capsys.readouterr().out


def test_a_pickle_beside_safetensors_is_not_opened(place: Path) -> None:
    (place / "pytorch_model.bin").write_bytes(b"not a pickle at all")
    assert TransformersSide(place).dtype == torch.float32
