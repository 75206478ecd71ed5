"""Counts that the literature quotes: trained values of LoRA, and the bytes of codes of four bits."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.files.spec import from_yaml, load_spec
from dovetail.model.model import Model
from dovetail.ops.formats.kinds import NF4, Int4
from dovetail.spec.fold import declared, parameters
from dovetail.weights.adapters.attach import read_adapter, targeted


def trained(spec: Model, **fields: Any) -> int:
    """The values that LoRA trains, from its declarations."""
    kind = read_adapter({"kind": "lora", **fields})
    return sum(d.size for base in targeted(kind, spec) for d in kind.declare(base))


def test_lora_of_rank_16_on_a_matrix_of_2048_trains_65536_values() -> None:
    spec = from_yaml("{width: 2048, vocab: 9, layers: [{mixer: {heads: 16}, ffn: null}]}")
    count = trained(spec, rank=16, targets=["mixer.q"])
    assert count == 65_536
    assert count / 2048**2 == pytest.approx(0.0156, abs=0.0001)


def test_lora_on_q_and_v_of_an_8b_llama_trains_6_8_million_values() -> None:
    count = trained(load_spec("llama-3-8b"), rank=16, targets=["mixer.q", "mixer.v"])
    assert count == 32 * 16 * ((4096 + 4096) + (4096 + 1024))
    assert count / 1e6 == pytest.approx(6.8, abs=0.05)
    assert 2 * count / 1e6 == pytest.approx(13.6, abs=0.05)  # MB in fp16


def test_rank_1_on_every_matrix_of_an_8b_llama_trains_2_62_million_values() -> None:
    assert trained(load_spec("llama-3-8b"), rank=1) == 2_621_440


def test_70_billion_parameters_in_4_bits_are_35_gb() -> None:
    spec = load_spec("llama-3-70b")
    codes = sum((d.size + 1) // 2 for d in declared(spec) if d.weight.learned)
    assert parameters(spec) / 1e9 == pytest.approx(70.6, abs=0.1)
    assert codes / 1e9 == pytest.approx(35, abs=0.5)
    matrix = NF4(group=64).tensors((28672, 8192))
    assert matrix["weight_packed"].nbytes == 28672 * 8192 / 2  # two codes per byte
    assert 70 * float(Int4(group=64).bits_per_weight(8192)) / 8 == pytest.approx(37.2, abs=0.05)  # with a scale per 64
