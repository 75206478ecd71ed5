"""Sparse autoencoders on disk against SAELens: ours read by its loader, and those of its writers read by us."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import IDS, MODEL

import dovetail as dt

PYTHON = Path(__file__).parents[2] / ".peers" / "sae-lens" / "bin" / "python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (PYTHON.parents[1] / "ready").exists(), reason="bash benchmarks/peers/make sae-lens"),
]


def test_both_read_what_the_other_writes(tmp_path: Path) -> None:
    x = dt.look.trace(MODEL, IDS, "layers.1.in")["layers.1.in"].float().flatten(0, 1)
    ours = dt.look.train_sae(x, "layers.1.in", features=60, k=3, steps=50, batch=16)
    ours.save(tmp_path / "ours")
    save_file({"x": x.contiguous()}, tmp_path / "x.safetensors")
    script, env = Path(__file__).with_name("sae_lens_side.py"), {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([PYTHON, script, tmp_path], capture_output=True, text=True, timeout=900, check=False, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = load_file(tmp_path / "features.safetensors")
    for name in ("ours", "plain", "rescaled"):
        sae = dt.look.load_sae(tmp_path / name)
        features = sae.encode(x)
        assert (features > 0).any()
        torch.testing.assert_close(features, theirs[f"{name} features"], rtol=1e-4, atol=1e-5, msg=name)
        torch.testing.assert_close(sae.decode(features), theirs[f"{name} decoded"], rtol=1e-4, atol=1e-4, msg=name)
    again = dt.look.load_sae(tmp_path / "again")
    assert (again.address, again.k) == ("layers.1.in", 3)
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    run = dt.look.trace(MODEL, IDS, "head.logits", patch=dt.look.load_sae(tmp_path / "plain").steer(2, 3.0))
    plain = dt.look.trace(MODEL, IDS, "head.logits")
    assert not torch.equal(run["head.logits"], plain["head.logits"])  # the name of its hook is an address here
