"""The blind score: sites of mutations, the rules that judge a verdict, and a short run."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SOURCE = '''
import torch
from torch import nn

LIMIT = 7

def turned(x):
    """Turns."""
    x1 = x[..., :3]
    return torch.cat((-x1, x), dim=-1)

class Mix(nn.Module):
    def forward(self, q, k, mask=None):
        if mask is not None:
            k = self.gate(q) * self.up(k)
        return turned(q.transpose(1, 2), k)

class Other(nn.Module):
    def forward(self, x):
        return x + 1
'''


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def file() -> Any:
    from blind_sites import ModelingFile

    return ModelingFile("here.modeling", SOURCE, "Mix", None, frozenset({"Mix", "turned"}))


def changed(file: Any, site: Any) -> str:
    from blind_sites import Mutations

    tree = Mutations(file.region, site.number).visit(ast.parse(file.source))
    return ast.unparse(ast.fix_missing_locations(tree))


def test_every_site_changes_the_region_and_nothing_else(file: Any) -> None:
    from blind_sites import KINDS, NAMES, Mutations, sites

    unchanged = ast.unparse(Mutations(file.region).visit(ast.parse(SOURCE)))
    assert "class Other" not in unchanged
    assert "LIMIT = 7" in unchanged
    found = sites(file)
    assert {site.within.partition(".")[0] for site in found} == {"Mix", "turned"}
    assert {site.kind for site in found} == {*KINDS.values(), NAMES}
    texts = [changed(file, site) for site in found]
    assert unchanged not in texts
    assert len({*texts}) >= len(found) - 1  # the two ways to exchange two arguments may be one


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("self.gate and self.up swapped", "k = self.up(q) * self.gate(k)"),
        ("q and k swapped", "k = self.gate(k) * self.up(q)"),
        ("mask is not None: Is", "if mask is None:"),
        ("[:3] + 1", "x1 = x[..., 0 + 1:3 + 1]"),
        ("q.transpose(1, 2): the call dropped", "return turned(q, k)"),
        ("q.transpose(1, 2): arguments 1 and 2 swapped", "return turned(q.transpose(2, 1), k)"),
        ("torch.cat((-x1, x), dim=-1): dim dropped", "return torch.cat((-x1, x))"),
        ("-x1: the sign dropped", "return torch.cat((x1, x), dim=-1)"),
        ("axis -1: -2", "return torch.cat((-x1, x), dim=-2)"),
        ("self.gate(q): the call dropped", "k = q * self.up(k)"),
    ],
)
def test_a_mutation_is_the_change_that_it_names(file: Any, what: str, line: str) -> None:
    from blind_sites import sites

    texts = [changed(file, site) for site in sites(file) if site.what == what]
    assert any(line in [one.strip() for one in text.splitlines()] for text in texts)


def test_a_statement_is_the_one_around_the_site(file: Any) -> None:
    from blind_sites import sites

    statements = {site.what: site.statement for site in sites(file)}
    assert statements["mask is not None: Is"] == "mask is not None"
    assert statements["self.gate and self.up swapped"] == "k = self.gate(q) * self.up(k)"


@pytest.mark.parametrize(
    ("within", "statement", "parts", "classes"),
    [
        ("LlamaAttention.forward", "attn_output = self.o_proj(attn_output)", {"mixer"}, {"weights", "residual"}),
        ("eager_attention_forward", "w = w + attention_mask", {"mixer"}, {"mask"}),
        ("LlamaRotaryEmbedding.forward", "cos = emb.cos() * self.attention_scaling", {"mixer"}, {"rotary"}),
        ("Gemma2RMSNorm._norm", "return x * self.weight", {"norm"}, {"norm"}),
        ("MixtralTopKRouter.forward", "x = y", {"ffn"}, {"router"}),
        ("MixtralSparseMoeBlock.forward", "x = y", {"ffn"}, set()),
        ("GPT2Block.forward", "hidden_states = self.ln_2(hidden_states)", {"block", "norm"}, {"norm"}),
        ("LlamaDecoderLayer.forward", "hidden_states = residual + hidden_states", {"block"}, {"residual"}),
    ],
)
def test_part_and_classes_of_a_statement(within: str, statement: str, parts: set[str], classes: set[str]) -> None:
    from blind_rules import classes_of_site, parts_of_site

    assert parts_of_site(within, statement) == parts
    assert classes_of_site(within, statement) == classes


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("mixer.o.in", {"mixer"}),
        ("mixer.q_norm", {"mixer", "norm"}),
        ("mixer.q_norm.in", {"mixer"}),
        ("ffn.down", {"ffn"}),
        ("ffn_norm", {"norm"}),
        ("mixer_norm.in", {"block"}),
        ("ffn_norm.in", {"block", "mixer"}),
        ("mixer_post_norm.in", {"block", "mixer"}),
        ("", {"block", "ffn"}),
    ],
)
def test_parts_of_a_tap(address: str, parts: set[str]) -> None:
    from blind_rules import parts_of_tap

    assert parts_of_tap(address) == parts


@pytest.mark.parametrize(
    ("cause", "classes"),
    [
        ("norm's eps", {"norm"}),
        ("qk-norm missing", {"norm"}),
        ("rotary direction", {"rotary"}),
        ("gate and up swapped", {"weights"}),
        ("heads and channels swapped", {"heads"}),
        ("layer's scale", {"residual"}),
        ("mixer.kv_heads", {"heads"}),
        ("–", set()),
    ],
)
def test_classes_of_a_cause(cause: str, classes: set[str]) -> None:
    from blind_rules import classes_of_cause

    assert classes_of_cause(cause) == classes


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a minute alone, many under load
def test_a_short_run(tmp_path: Path) -> None:
    table = tmp_path / "cases.json"
    command = [sys.executable, str(BENCHMARKS / "blind.py"), "--quick", "--json", "--seed", "1", "--table", str(table)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {row["name"]: row["value"] for row in json.loads(done.stdout)["rows"]}
    cases = json.loads(table.read_text())
    assert rows["mutated models"] == len(cases) == 4
    assert rows["false alarms"] == 0
    assert rows["first bad layer named right"] == sum(case["layer_right"] for case in cases) / 4
    assert rows["first bad layer named right"] > 0.25  # by chance, of 4 layers
