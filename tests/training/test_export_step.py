"""`dovetail export RUN --step N`: a checkpoint of a run in Hugging Face layout, one tensor at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from train_jobs import SPEC, save_step

import dovetail as dt
from dovetail.base.errors import FileError
from dovetail.cli import main
from dovetail.files.spec import from_yaml, to_yaml
from dovetail.parallel.pair import Pair
from dovetail.spec.fold import declared
from dovetail.training.checkpoint import Checkpoints

LARGE = """
width: 512
vocab: 2048
layers:
- repeat: 6
  mixer: {heads: 8, head: 64}
  ffn: {hidden: 1376}
"""
MEASURE = """
import json, resource, sys
from pathlib import Path
import dovetail as dt

def status(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))

dt.export("small", "small-hf", step=1)  # imports what an export needs
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
dt.export("large", "large-hf", step=1)
print(json.dumps({"peak": status("VmHWM") - before, "size": Path("large-hf/model.safetensors").stat().st_size}))
"""


def run_of(place: Path, spec: str = SPEC) -> Path:
    place.mkdir()
    (place / "dovetail.yaml").write_text(to_yaml(from_yaml(spec)))
    return place


def test_a_sharded_checkpoint_is_exported(pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = run_of(tmp_path / "run"), tmp_path / "out"
    for step in (120, 130):
        pair.run(save_step, str(run / "checkpoints"), step, step)
    with pytest.raises(SystemExit) as ended:
        main(["export", str(run), "--step", "120", "-o", str(out), "--json"])
    assert not ended.value.code
    assert json.loads(capsys.readouterr().out)["model_type"] == json.loads((out / "config.json").read_text())["model_type"]
    written, expected = dt.load(out).state_dict(), dt.build(from_yaml(SPEC), seed=120).state_dict()
    assert all(torch.equal(written[name], weight) for name, weight in expected.items())


def test_a_step_without_a_checkpoint_is_named_with_those_that_there_are(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    with pytest.raises(FileError, match="holds no checkpoint of step 7; train with out first"):
        dt.export(run, tmp_path / "out", step=7)
    for step in (3, 5):
        Checkpoints(run / "checkpoints").save(step, {"weights.a": torch.zeros(2)}, {})
    with pytest.raises(FileError, match=r"holds no checkpoint of step 7; steps: 3, 5"):
        dt.export(run, tmp_path / "out", step=7)
    with pytest.raises(FileError, match=r"holds no weights\.embed"):
        dt.export(run, tmp_path / "out", step=5)


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    Checkpoints(run / "checkpoints").save(3, weights(SPEC), {})
    file = run / "checkpoints" / "step-00000003" / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 4
    file.write_bytes(data)
    with pytest.raises(FileError, match="is damaged"):
        dt.export(run, tmp_path / "out", step=3)
    assert not (tmp_path / "out").exists()


def weights(spec: str) -> dict[str, torch.Tensor]:
    shapes = {f"weights.{d.path}": d.weight.shape(d.scope) for d in declared(from_yaml(spec)) if d.weight.stored}
    return {name: torch.full(shape, 0.5) for name, shape in shapes.items()}


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_model_is_never_in_memory(tmp_path: Path) -> None:
    for name, spec in (("small", SPEC), ("large", LARGE)):
        Checkpoints(run_of(tmp_path / name, spec) / "checkpoints").save(1, weights(spec), {})
    done = subprocess.run([sys.executable, "-c", MEASURE], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["size"] > 80e6
    assert found["peak"] < 0.3 * found["size"], found
