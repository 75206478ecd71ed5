"""Matrices of 8 bits by torchao and by ours: the same codes on the same scales, and the same products."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dovetail.nn.linear import Linear
from dovetail.ops.formats.format import CODES, SCALE
from dovetail.ops.formats.kinds import FP8, Int8
from dovetail.weights.quantization.leaf import store_quantized

ROOT = Path(__file__).parents[2]
PEERS = ROOT / ".peers" / "tuning"
FORMATS = {"int8": Int8(), "int8_dynamic": Int8(dynamic=True), "fp8": FP8()}
LARGEST = {"int8": 127.5, "int8_dynamic": 127.5, "fp8": 448.0}  # in units of torchao's scale


def matrix(largest: float) -> Tensor:
    """(96, 128), the scales of which are powers of two, so that bfloat16 holds them; each row has its largest value once."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(96, 128, generator=generator).clamp(-2, 2) / 2.5
    w[:, 3] = 1.0
    return w * largest * 2.0 ** torch.randint(-9, -5, (96, 1), generator=generator)


@pytest.mark.slow
@pytest.mark.skipif(not (PEERS / "ready").exists(), reason="benchmarks/peers/make tuning")
def test_products_are_those_of_torchao(tmp_path: Path) -> None:
    x = torch.randn(7, 128, generator=torch.Generator().manual_seed(1))
    matrices = {name: matrix(largest) for name, largest in LARGEST.items()}
    save_file({"x": x, **{f"{name}.w": w for name, w in matrices.items()}}, tmp_path / "in.safetensors")
    command = [PEERS / "bin" / "python", ROOT / "tests" / "quantization" / "peers_torchao.py"]
    command += [tmp_path / "in.safetensors", tmp_path / "out.safetensors"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    subprocess.run([str(one) for one in command], check=True, env=environment, timeout=600)
    found = load_file(tmp_path / "out.safetensors")
    for name, format in FORMATS.items():
        codes, scale = found[f"{name}.codes"], found[f"{name}.scale"]
        tensors = format.encode(matrices[name], {SCALE: scale.bfloat16()})
        assert torch.equal(tensors[SCALE].float(), scale), name
        assert torch.equal(tensors[CODES].float(), codes.float()), name
        dense = Linear((96, 128))
        dense.weight = torch.nn.Parameter(matrices[name])
        with torch.no_grad():
            ours, theirs = store_quantized(dense, format, tensors).leaf(x), found[f"{name}.y"]
            exact = x.double() @ format.decode(tensors, 128).double().T
        size = exact.abs().max()
        if not format.rounds_inputs:
            assert (ours - theirs).abs().max() < 1e-5 * size, name
            continue
        # they divide a token by max |x| / 127.5, we by max |x| / 127: other roundings of the same size
        error, other = ((y - exact).pow(2).mean().sqrt() for y in (ours, theirs))
        assert other / 1.3 < error < 1.3 * other, (float(error), float(other))
        assert error < 0.01 * size
