"""Hidden states and patterns against TransformerLens' hooks, each compared under the name that its users know."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from draws import FIRST, Draw
from hf_pair import Pair, apart
from safetensors.torch import load_file, save_file

from dovetail.base.errors import SpecError
from dovetail.look.address import resolve
from dovetail.look.tracer import trace
from dovetail.spec.fold import taps

PYTHON = Path(__file__).parents[2] / ".peers" / "transformer-lens" / "bin" / "python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (PYTHON.parents[1] / "ready").exists(), reason="bash benchmarks/peers/make transformer-lens"),
]
EACH = ("hook_resid_pre", "hook_attn_out", "hook_mlp_out", "hook_resid_post", "attn.hook_pattern")


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama"])
def test_activations_are_those_of_its_hooks(family: str, tmp_path: Path) -> None:
    fields = FIRST[family](Draw(f"{family} 0"))
    if family == "gpt_neox":
        fields["attention_bias"] = True  # as Pythia has, and as TransformerLens requires
    pair = Pair(family, fields, 0)
    tokens, depth = torch.tensor(pair.prompts([9, 9])), len(pair.spec.layers)
    pair.theirs.save_pretrained(tmp_path / "model")
    save_file({"tokens": tokens}, tmp_path / "tokens.safetensors")
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    script = Path(__file__).with_name("transformer_lens_side.py")
    done = subprocess.run([PYTHON, script, tmp_path], capture_output=True, text=True, timeout=900, check=False, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs, compared = load_file(tmp_path / "cache.safetensors"), set[str]()
    ours = trace(pair.ours, tokens, *taps(pair.spec))
    assert apart(ours["head.logits"], theirs["logits"]) <= 1e-5
    for name, want in theirs.items():
        try:
            (target,) = resolve(pair.spec, [name])
        except SpecError:
            continue  # it has no counterpart
        assert ours[target.address].shape == want.shape, f"{name} and {target.address}"
        assert apart(ours[target.address], want) <= 1e-5, f"{name} and {target.address}"
        compared.add(name)
    rotated = ("rot_q", "rot_k") if family == "llama" else ()  # of GPT-NeoX, the bridge reads none
    each = [*EACH, *(f"attn.hook_{name}" for name in rotated)]
    assert compared >= {f"blocks.{i}.{name}" for i in range(depth) for name in each}
