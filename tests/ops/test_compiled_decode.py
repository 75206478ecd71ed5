"""Compiled decoding: the choice of a backend reads no symbolic size, so a block compiles to two graphs and no more."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo import reset
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

from dovetail.files.spec import load_spec
from dovetail.model.construction import build
from dovetail.nn.ctx import Ctx
from dovetail.state.pool import Pool

GRAPHS = 2  # the prefill; every decode step, with the number of cached tokens as a symbol


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["llama-tiny", "deepseek-tiny"])
def test_a_block_compiles_once_for_all_decode_steps(name: str) -> None:
    spec = load_spec(name)
    model, pool, graphs = build(spec), Pool(spec, 2, 64), CompileCounter()
    reset()
    counters.clear()
    model.layers[0] = torch.compile(model.layers[0], backend=graphs)
    tokens = torch.arange(18).reshape(2, 9)
    with torch.no_grad():
        for new in [tokens] + [tokens[:, :1]] * 12:
            step = pool.step([0, 1], [new.shape[1]] * 2)
            model(new, Ctx(layout=step.layout, views=step.views))
    assert not counters["graph_break"]
    assert graphs.frame_count == GRAPHS
