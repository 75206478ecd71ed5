"""Nothing that is not finite is called equal: NaN weights, overflow in a narrow dtype, and code that exits by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import llama
from safetensors.torch import load_file, save_file

from dovetail.cli import main
from dovetail.proof.compare.check import verify
from dovetail.proof.compare.prompt import random_prompt
from dovetail.proof.compare.sides import NativeSide


def with_value(place: Path, name: str, value: float) -> Path:
    """Put one value into one weight of a model directory."""
    tensors = load_file(place / "model.safetensors")
    tensors[name].view(-1)[0] = value
    save_file(tensors, place / "model.safetensors")
    return place


def test_two_models_with_one_nan_each_are_not_equal(tmp_path: Path) -> None:
    a, _ = llama(tmp_path / "a", seed=0)
    b, _ = llama(tmp_path / "b", seed=1)
    for place in (a, b):
        with_value(place, "layers.0.mixer_norm.scale", float("nan"))
    one, other = NativeSide(a), NativeSide(b)
    assert one.spec is not None
    verdict = verify(one, other, random_prompt(one.spec))
    assert verdict.failed
    tensors = load_file(b / "model.safetensors")
    save_file({**tensors, "embed.table": load_file(a / "model.safetensors")["embed.table"]}, b / "model.safetensors")
    verdict = verify(one, NativeSide(b), random_prompt(one.spec))
    assert verdict.status == "non-finite"
    assert verdict.first is not None
    assert (verdict.first.address, verdict.first.nonfinite) == ("layers.0.mixer_norm", "A in float64")
    assert verdict.nonfinite == ["A: layers.0.mixer_norm.scale", "B: layers.0.mixer_norm.scale"]


def test_a_nan_that_the_prompt_does_not_read_is_reported(tmp_path: Path) -> None:
    place, _ = llama(tmp_path)
    side = NativeSide(place)
    assert side.spec is not None
    prompt = random_prompt(side.spec)
    unread = next(token for token in range(62) if token not in prompt.inputs)
    tensors = load_file(place / "model.safetensors")
    tensors["embed.table"][unread, 3] = float("inf")
    save_file(tensors, place / "model.safetensors")
    verdict = verify(NativeSide(place), NativeSide(place), prompt)
    assert verdict.first is None
    assert verdict.status == "non-finite"
    assert verdict.nonfinite == ["A: embed.table", "B: embed.table"]


def test_overflow_in_float16_is_not_equal(tmp_path: Path) -> None:
    place, _ = llama(tmp_path)
    tensors = load_file(place / "model.safetensors")
    tensors["layers.1.ffn.up.weight"].mul_(1e4)
    tensors["layers.1.ffn.down.weight"].mul_(1e4)
    save_file(tensors, place / "model.safetensors")
    side = NativeSide(place)
    assert side.spec is not None
    verdict = verify(side, side, random_prompt(side.spec), dtype=torch.float16)
    assert (verdict.status, verdict.layer) == ("non-finite", "layers.1")
    assert verdict.first is not None
    assert verdict.first.nonfinite == "A in float16"


EXITS = """
import sys
from torch import nn
{at_import}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(62, 62)

    def forward(self, ids):
        {in_forward}
        return self.table(ids)

Model = Net

def load():
    {in_factory}
    return Net()
"""


@pytest.mark.parametrize("where", ["at_import", "in_factory", "in_forward"])
@pytest.mark.parametrize("statement", ["sys.exit(0)", "1 / 0"])
def test_code_that_exits_is_an_error_and_no_verdict(
    tmp_path: Path, where: str, statement: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place, _ = llama(tmp_path)
    places = {"at_import": "", "in_factory": "pass", "in_forward": "pass", where: statement}
    (tmp_path / "mine.py").write_text(EXITS.format(**places))
    with pytest.raises(SystemExit) as stopped:
        main(["verify", str(place), f"py:{tmp_path / 'mine.py'}:load"])
    assert stopped.value.code == 4
    out, err = capsys.readouterr()
    assert "equal" not in out
    assert ("called sys.exit(0)" if "exit" in statement else "ZeroDivisionError") in err
    assert "mine.py" in err
