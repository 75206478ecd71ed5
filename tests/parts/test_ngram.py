"""N-gram embeddings: the hash against whole numbers of Python, the decode state, and the ids that inner layers read."""

from __future__ import annotations

import pytest
import torch

import dovetail as dt
from dovetail.base.errors import SpecError
from dovetail.parts.mixer.ngram import WORD, Ngram
from dovetail.state.pool import Pool

SPEC = """
width: 28
vocab: 62
layers:
- {mixer: {heads: 7}, ffn: {hidden: 44}}
- kind: hybrid_block
  mixer: {heads: 6, kv_heads: 2, head: 10}
  ssm: {kind: ngram, n: 3, hashes: 2, rows: 13, piece: 5}
  ffn: {hidden: 36}
"""


def signed(x: int) -> int:
    return (x + WORD // 2) % WORD - WORD // 2


def test_rows_are_those_of_whole_numbers() -> None:
    model = dt.build(SPEC)
    module, ids = model.layers[1].ssm, [5, 61, 0, 17, 17]
    found, last = module.found(torch.tensor([ids]) + 1, dt.nn.rows.sequence_rows(dt.TokenLayout.whole(1, 5)), None)
    for t in range(5):
        for h, many in enumerate(module.multiplier.tolist()):
            key = 0
            for d, factor in enumerate(many):
                key ^= signed((ids[t - d] + 1) * factor) if t >= d else 0
            assert found[0, t, h] == key % 13 + 13 * h
    assert last.tolist() == [[18, 18]]


def test_the_state_is_whole_numbers_and_decodes() -> None:
    model = dt.build(SPEC)
    pool = Pool(model.spec, 2, 16, dtype=torch.bfloat16)
    assert [store.dtype for group in pool.groups.values() for store in group.stores.get((1, "ssm"), [])] == [torch.int64]
    whole = [5, 3, 7]
    for _ in range(6):
        whole.append(int(model(torch.tensor([whole]))[0, -1].argmax()))
    assert list(model.generate([5, 3, 7], max_tokens=6, temperature=0.0)) == whole[3:]


def test_ids_beyond_the_window_do_not_matter() -> None:
    model = dt.build("width: 28\nvocab: 62\nlayers: [{mixer: {kind: ngram, n: 3, rows: 997, piece: 5}, ffn: null}]")
    ids = torch.randint(0, 62, (1, 9))
    other = ids.clone()
    other[0, 2] = (ids[0, 2] + 1) % 62
    same = (model(ids) == model(other)).all(-1)[0].tolist()
    assert same == [True, True, False, False, False, True, True, True, True]


def test_a_model_without_token_ids_is_refused() -> None:
    spec = dt.build("vit-tiny").spec.set("layers.0.mixer", {"kind": "ngram"})
    with pytest.raises(SpecError, match=r"layers\.0\.mixer: reads inputs of the model, which publishes embedded"):
        dt.build(spec)


def test_seeds_draw_other_hashes() -> None:
    one, other = (Ngram(seed=seed).constant("multiplier", None) for seed in (0, 1))
    assert not torch.equal(one, other)
