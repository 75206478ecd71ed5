"""dt.runs: runs are listed and compared, and the arms of a swap are fair."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail as dt
from dovetail.api import train_job
from dovetail.base.errors import FileError
from dovetail.cli import main

SPEC = "{width: 28, vocab: 270, layers: [{repeat: 2, mixer: {heads: 2, kv_heads: 1}, ffn: {hidden: 44}}]}"
SMALL: dict[str, Any] = {"batch": 4, "length": 16, "sample": 0, "quiet": True, "steps": 3, "evals": 1}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four runs: a base, two arms with one part swapped each, and one with another seed. `batches` are those of each."""
    place = tmp_path_factory.mktemp("runs")
    (place / "tale.txt").write_text("It was the best of times, it was the worst of times.\n" * 40, encoding="utf-8")
    train, seen = train_job.train_loop, dict[str, Any]()
    with pytest.MonkeyPatch.context() as patch:
        arms: dict[str, dict[str, Any]] = {
            "base": {},
            "alibi": {"swap": ["position=alibi"]},
            "layernorm": {"swap": ["norm=layernorm"]},
            "seed": {"seed": 1},
        }
        for name, change in arms.items():

            def spied(model: Any, batches: Any, *rest: Any, name: str = name, **more: Any) -> Any:
                first = {path: tensor.clone() for path, tensor in model.state_dict().items()}
                seen[name] = ([batches(step).tokens for step in range(3)], first)
                return train(model, batches, *rest, **more)

            patch.setattr(train_job, "train_loop", spied)
            dt.train(SPEC, place / "tale.txt", out=place / "arms" / name, **SMALL, **change)
    torch.save(seen, place / "seen.pt")
    return place


@pytest.mark.parametrize(("arm", "field"), [("alibi", "mixer.position"), ("layernorm", "norm")])
def test_the_arms_of_a_swap_are_fair(home: Path, arm: str, field: str) -> None:
    seen = torch.load(home / "seen.pt")
    (batches, weights), (base_batches, base) = seen[arm], seen["base"]
    assert all(torch.equal(a, b) for a, b in zip(batches, base_batches, strict=True))
    common = [path for path in base if path in weights and base[path].shape == weights[path].shape]
    assert len(common) > 10
    assert all(torch.equal(base[path], weights[path]) for path in common)
    result = dt.runs(home / "arms" / "base", home / "arms" / arm)
    (found,) = result.comparisons
    assert found.fair
    assert found.tokens == (192, 192)
    assert found.settings == ()
    assert any(field in path for path, _, _ in found.spec)
    shown = str(result)
    assert "batches   equal, bit for bit" in shown
    assert f"initial weights that both have   equal, bit for bit: {found.shared_weights}" in shown
    assert "tokens    equal: 192" in shown
    assert "fair      yes" in shown
    assert found.equal_in == "parameters"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"set": ["width=32"]}, r"budget \([\d,]+ and [\d,]+ parameters"),
        ({"learning_rate": 1e-3}, r"tuning \(learning_rate\)"),
        ({"optimizer": "muon"}, r"tuning \(optimizer\)"),
    ],
)
def test_a2_another_budget_or_tuning_is_not_fair(home: Path, tmp_path: Path, change: dict[str, Any], what: str) -> None:
    """130,240 against 162,072 parameters were called fair."""
    dt.train(SPEC, home / "tale.txt", out=tmp_path / "other", **SMALL, **change)
    result = dt.runs(home / "arms" / "base", tmp_path / "other")
    (found,) = result.comparisons
    assert found.fair is False
    assert re.search(what, ", ".join(found.unfair))
    assert re.search(f"fair      no: other .*{what}", str(result))
    assert found.to_dict()["unfair"] == list(found.unfair)


def test_another_seed_is_not_fair(home: Path) -> None:
    seen = torch.load(home / "seen.pt")
    assert not torch.equal(seen["seed"][0][0], seen["base"][0][0])
    result = dt.runs(home / "arms" / "base", home / "arms" / "seed")
    (found,) = result.comparisons
    assert found.fair is False
    assert found.settings == (("seed", 0, 1),)
    assert "batches   differ: seed" in str(result)
    assert f"differ: {len(found.different_weights)} of {found.shared_weights}, the first" in str(result)


def test_runs_below_a_directory_are_listed_with_their_state(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["runs", str(home), "--json", "--plot", str(home / "all.svg")])
    assert end.value.code == 0
    data = json.loads(capsys.readouterr().out)
    assert [Path(one["run"]).name for one in data["runs"]] == ["alibi", "base", "layernorm", "seed"]
    assert {one["state"] for one in data["runs"]} == {"complete"}
    assert all(one["bits_per_byte"] > 0 and one["mfu"] > 0 and one["tokens"] == 192 for one in data["runs"])
    drawn = (home / "all.svg").read_text()
    assert all(f"arms/{name} -->" in drawn for name in ("alibi", "base", "layernorm", "seed"))
    handle = os.open(home / "arms" / "base" / "run.yaml", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert dt.runs(home / "arms" / "base").records[0].state == "running"
    os.close(handle)


def test_a_run_without_its_last_step_is_interrupted(home: Path, tmp_path: Path) -> None:
    source, place = home / "arms" / "base", tmp_path / "killed"
    place.mkdir()
    for name in ("run.yaml", "initial.json"):
        (place / name).write_bytes((source / name).read_bytes())
    lines = (source / "loss.jsonl").read_text().splitlines(keepends=True)
    (place / "loss.jsonl").write_text(lines[0] + lines[1] + lines[2][:20])
    (record,) = dt.runs(tmp_path).records
    assert (record.state, len(record.history)) == ("interrupted", 2), "a half-written line is left out"
    (found,) = dt.runs(source, place).comparisons
    assert (found.fair, found.tokens) == (False, (192, 128))
    (place / "initial.json").unlink()
    assert "not recorded" in str(dt.runs(source, place))
    (place / "run.yaml").write_text("[]")
    assert "is not a mapping of settings" in str(dt.runs(tmp_path))


def test_nothing_is_reported_as_nothing(tmp_path: Path) -> None:
    assert "no runs here" in str(dt.runs(tmp_path))
    with pytest.raises(FileError, match="no such directory"):
        dt.runs(tmp_path / "none")
    with pytest.raises(FileError, match="0 runs have losses"):
        dt.runs(tmp_path, plot=tmp_path / "x.png")


@pytest.mark.slow
def test_a_process_of_its_own_lists_runs(home: Path) -> None:
    """Parts are registered where a run is read."""
    command = [sys.executable, "-m", "dovetail", "runs", str(home / "arms"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["runs"]) == 4
