"""Each rank loads its own shard of a checkpoint, in either layout, with the values of the whole checkpoint."""

from pathlib import Path

import pytest
import torch
from construction_jobs import loaded
from shard_specs import WIRINGS

from dovetail.base.errors import FileError
from dovetail.files.model_dir import save
from dovetail.files.spec import from_yaml
from dovetail.hf.origin import find_spec
from dovetail.hf.write import write_fresh
from dovetail.model.construction import build
from dovetail.parallel.mesh import RankError
from dovetail.parallel.pair import Pair


def close(found: dict[str, object], gap: float) -> None:
    assert found["different"] == found["buffers"] == found["untied"] == []
    assert isinstance(found["gap"], float)
    assert found["gap"] <= gap


@pytest.mark.quick(1)
@pytest.mark.parametrize(("data", "tensor"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny", "mixtral-tiny", "deepseek-tiny"])
def test_of_hugging_face_layout(pair: Pair, tmp_path: Path, name: str, data: int, tensor: int) -> None:
    write_fresh(build(find_spec(name), seed=2), tmp_path / "hf")  # gpt2 fuses q, k, v; mixtral stores every expert alone
    for found in pair.run(loaded, str(tmp_path / "hf"), data, tensor):
        close(found, 1e-5)
        assert found["values"] < 0.75 * found["values whole"]


@pytest.mark.parametrize("name", ["shared_layers", "untied", "packed"])
def test_of_our_layout(pair: Pair, tmp_path: Path, name: str) -> None:
    spec = from_yaml(WIRINGS[name])
    save(build(spec, seed=2), spec, tmp_path / "own")
    for found in pair.run(loaded, str(tmp_path / "own"), 1, 2):
        close(found, 1e-5)


def test_in_another_dtype(pair: Pair, tmp_path: Path) -> None:
    spec = from_yaml(WIRINGS["llama"])
    save(build(spec, dtype=torch.bfloat16), spec, tmp_path / "own")
    for found in pair.run(loaded, str(tmp_path / "own"), 2, 1, "float32"):
        close(found, 1e-5)


def test_a_missing_weight_is_named(pair: Pair, tmp_path: Path) -> None:
    spec = from_yaml(WIRINGS["llama"])
    save(build(spec), spec, tmp_path / "own")
    text = (tmp_path / "own" / "dovetail.yaml").read_text()
    (tmp_path / "own" / "dovetail.yaml").write_text(text.replace("repeat: 2", "repeat: 3"))
    with pytest.raises((RankError, FileError), match="is missing"):
        pair.run(loaded, str(tmp_path / "own"), 1, 2)
