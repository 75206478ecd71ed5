"""Sides of every kind: a user's own module with its own names, an emitted file, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from models import LLAMA, llama, written

from dovetail.base.errors import FileError
from dovetail.codegen.file import emit
from dovetail.files.spec import from_yaml
from dovetail.proof.compare.check import verify
from dovetail.proof.compare.opening import local, pair
from dovetail.proof.compare.prompt import random_prompt
from dovetail.proof.compare.transformers_side import TransformersSide

# an implementation with names of its own: a llama without rotary positions, of two layers
MINE = """
import torch, torch.nn.functional as F
from pathlib import Path
from safetensors.torch import load_file
from torch import nn


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Parameter(torch.ones(30))

    def forward(self, x):
        return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5).to(x.dtype) * self.g


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = Norm(), Norm()
        self.wq, self.wk, self.wv, self.proj = (nn.Linear(30, 30, bias=False) for _ in range(4))
        self.w1, self.w3, self.w2 = nn.Linear(30, 44, bias=False), nn.Linear(30, 44, bias=False), nn.Linear(44, 30, bias=False)

    def forward(self, x):
        h = self.n1(x)
        q, k, v = (w(h).unflatten(-1, (5, 6)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE).transpose(1, 2).flatten(-2)
        x = x + self.proj(z)
        h = self.n2(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.blocks, self.last = nn.Embedding(62, 30), nn.ModuleList(Block() for _ in range(2)), Norm()

    def forward(self, ids):
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.last(x), self.emb.weight)


NAMES = {"mixer_norm.scale": "n1.g", "ffn_norm.scale": "n2.g", "mixer.q.weight": "wq.weight", "mixer.k.weight": "wk.weight",
         "mixer.v.weight": "wv.weight", "mixer.o.weight": "proj.weight", "ffn.gate.weight": "w1.weight",
         "ffn.up.weight": "w3.weight", "ffn.down.weight": "w2.weight"}
WHOLE = {"embed.table": "emb.weight", "norm.scale": "last.g"}
SCALE = 6**-0.5


def load():
    net = Net()
    held = load_file(Path(__file__).parent / "ours" / "model.safetensors")
    state = {}
    for name, tensor in held.items():
        if name.startswith("layers."):
            _, number, rest = name.split(".", 2)
            state[f"blocks.{number}.{NAMES[rest]}"] = tensor
        else:
            state[WHOLE[name]] = tensor
    net.load_state_dict(state)
    return net


def unscaled():
    global SCALE
    SCALE = 1.0
    return load()


def nothing():
    return 7
"""
SPEC = """
width: 30
vocab: 62
layers: [{repeat: 2, mixer: {heads: 5, position: none}, ffn: {hidden: 44}}]
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    from dovetail.files.model_dir import save
    from dovetail.model.construction import build

    spec = from_yaml(SPEC)
    save(build(spec, seed=3), spec, tmp_path / "ours")
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


@pytest.mark.slow
def test_a_module_with_names_of_its_own(mine: Path) -> None:
    a, b = pair(str(mine / "ours"), f"py:{mine / 'mine.py'}:load")
    assert a.spec is not None
    verdict = verify(a, b, random_prompt(a.spec))
    assert verdict.status == "equal"
    assert [tap.address for tap in verdict.comparison.taps] == [
        "layers.0.in",
        "layers.0",
        "layers.1",
        "answer",
    ]  # by their number
    assert max(tap.exact for tap in verdict.comparison.taps) < 1e-12


def test_told_which_modules_belong_together_the_first_bad_one_is_named(mine: Path) -> None:
    told = {"blocks.{}.proj": "layers.{}.mixer.o", "blocks.{}.wq": "layers.{}.mixer.q"}
    a, b = pair(str(mine / "ours"), f"py:{mine / 'mine.py'}:unscaled", told)
    assert a.spec is not None
    verdict = verify(a, b, random_prompt(a.spec))
    assert verdict.first is not None
    assert verdict.first.address == "layers.0.mixer.o.in"
    assert verdict.cause is not None
    assert verdict.cause.name == "score scale"


@pytest.mark.parametrize(
    ("text", "told", "problem"),
    [
        ("py:{}/mine.py:nothing", {}, "gave int, not an nn.Module"),
        ("py:{}/mine.py:absent", {}, "has no function called absent"),
        ("py:{}/none.py:load", {}, "no such file"),
        ("py:{}/mine.py", {}, "write py:file.py:factory"),
        ("{}/none", {}, "no such directory"),
    ],
)
def test_what_is_no_side_is_refused(mine: Path, text: str, told: dict[str, str], problem: str) -> None:
    with pytest.raises(FileError, match=problem):
        local(text.format(mine), told)


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        ({"blocks.{}.none": "layers.{}.mixer.o"}, r"has no blocks\.0\.none"),
        ({"blocks.{}.proj": "layers.{}.mixer.none"}, r"layers\.0\.mixer\.none is not a linear map, norm or layer"),
    ],
)
def test_a_map_that_names_nothing_is_refused(mine: Path, told: dict[str, str], problem: str) -> None:
    a, b = pair(str(mine / "ours"), f"py:{mine / 'mine.py'}:load", told)
    assert a.spec is not None
    with pytest.raises(FileError, match=problem):
        verify(a, b, random_prompt(a.spec))


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_an_emitted_file_is_the_model_it_was_written_from(tmp_path: Path, tied: bool) -> None:
    spec = from_yaml(LLAMA).set("head.tied", tied)
    ours, _ = written(tmp_path, spec)
    (tmp_path / "alone.py").write_text(emit(spec, "alone"))
    a, b = pair(str(ours), f"emit:{tmp_path / 'alone.py'}")
    assert a.spec is not None
    verdict = verify(a, b, random_prompt(a.spec))
    assert verdict.status == "equal"
    assert len(verdict.comparison.taps) > 10
    assert max(tap.exact for tap in verdict.comparison.taps) < 1e-12


def test_an_emitted_file_of_another_spec_is_refused(tmp_path: Path) -> None:
    ours, _ = written(tmp_path, from_yaml(LLAMA))
    (tmp_path / "alone.py").write_text(emit(from_yaml(LLAMA).set("layers.*.ffn.hidden", 52), "alone"))
    with pytest.raises(FileError, match="was written from another spec"):
        pair(str(ours), f"emit:{tmp_path / 'alone.py'}")


def test_two_emitted_files_hold_no_weights() -> None:
    with pytest.raises(FileError, match="one side must be a model directory"):
        pair("emit:a.py", "emit:b.py")


def test_without_transformers_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, theirs = llama(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it were not installed
    with pytest.raises(FileError, match=r"dovetail-lm\[hf\]"):
        TransformersSide(theirs)
