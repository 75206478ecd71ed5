"""The recurrent states of a mixer in a block of vLLM's cache: those of our pool, each in bytes of its own, copied as one."""

from __future__ import annotations

import pytest
import torch
from test_can_serve import with_mixer

from dovetail.files.spec import from_mapping
from dovetail.model.model import Model
from dovetail.nn.groups import Mixer
from dovetail.serving.can_serve import recurring
from dovetail.serving.vllm.recurrent import StateBlocks, placed_states
from dovetail.spec.part import KINDS
from dovetail.state.pool import Pool

BLOCKS, PADDING = 5, 48  # a page of vLLM may be longer than the states in it


def recurrent_specs() -> dict[str, Model]:
    """A spec per recurrent mixer."""
    specs = {
        kind: from_mapping(with_mixer(kind)) for kind, cls in sorted(KINDS.items()) if issubclass(cls, Mixer) and cls.recurrent
    }
    return {kind: spec for kind, spec in specs.items() if any(recurring(spec))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", recurrent_specs())
def test_a_block_has_every_state_of_the_pool(kind: str, dtype: torch.dtype) -> None:
    spec = recurrent_specs()[kind]
    (one,) = recurring(spec)
    placed, size = placed_states(one, dtype, {})
    blocks = StateBlocks(placed, size, "layer")
    blocks.bind_kv_cache(torch.zeros(BLOCKS, 1, 1, size + PADDING, dtype=torch.int8))
    (group,) = Pool(spec, rows=1, capacity=4, dtype=dtype).groups.values()
    (stores,) = group.stores.values()
    assert [(s.shape[1:], s.dtype) for s in blocks.stores] == [(s.shape[1:], s.dtype) for s in stores]
    for number, store in enumerate(blocks.stores):
        store[2] = number + 1
    (copied,) = blocks.kv_cache
    copied[4] = copied[2]
    for number, store in enumerate(blocks.stores):
        assert (store[2] == number + 1).all()
        assert (store[4] == number + 1).all()
        assert not store[3].any()
