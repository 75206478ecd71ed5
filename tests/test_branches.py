"""Blocks with other branches than a mixer and an ffn: one of them alone, as in Nemotron-H."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dovetail as dt
from dovetail.core.errors import SpecError
from dovetail.port.hf import to_hf
from dovetail.state.pool import Pool

SPEC = """
width: 28
vocab: 62
layers:
- {mixer: {kind: mamba2, head: 14}, ffn: null}
- {mixer: null, ffn: {kind: mlp, hidden: 44, act: relu2, bias: false}}
- {mixer: {heads: 6, kv_heads: 2, head: 10}, ffn: null}
- {mixer: null, ffn: {hidden: 36}}
"""


@pytest.fixture
def model() -> dt.Transformer:
    return dt.build(SPEC)


def test_a_block_of_an_ffn_alone_adds_it_to_the_stream(model: dt.Transformer) -> None:
    ids = torch.randint(0, 62, (2, 9))
    seen = model.trace(ids, "layers.*.in")
    block, x = model.layers[1], seen["layers.1.in"]
    normed = torch.nn.functional.rms_norm(x, (28,), block.ffn_norm.scale, 1e-5)
    ffn = block.ffn
    want = x + torch.relu(normed @ ffn.up.weight.T).square() @ ffn.down.weight.T
    torch.testing.assert_close(seen["layers.2.in"], want)
    assert not [name for name in model.state_dict() if name.startswith(("layers.1.mixer", "layers.3.mixer"))]


def test_it_has_no_decode_state_and_decodes(model: dt.Transformer) -> None:
    pool = Pool(model.spec, 1, 8)
    assert {layer for group in pool.groups.values() for layer, _ in group.stores} == {0, 2}
    ids = model.generate([5, 3, 7], max_tokens=4, temperature=0.0)
    whole = [5, 3, 7]
    for _ in range(4):
        whole.append(int(model(torch.tensor([whole]))[0, -1].argmax()))
    assert list(ids) == whole[3:]


def test_yaml_round_trip_swap_and_files(model: dt.Transformer, tmp_path: Path) -> None:
    spec = model.spec
    assert dt.from_yaml(str(spec)) == spec
    swapped = spec.swap("position", "alibi")
    assert [block.mixer is None for block in swapped.layers] == [False, True, False, True]
    dt.save(model, tmp_path / "saved")
    ids = torch.randint(0, 62, (1, 7))
    assert torch.equal(dt.load(tmp_path / "saved")(ids), model(ids))


def test_an_emitted_file_computes_the_same(model: dt.Transformer) -> None:
    scope: dict[str, object] = {"__name__": "emitted"}
    exec(compile(dt.emit(model.spec).text, "emitted", "exec"), scope)
    emitted = scope["Model"]().eval()  # type: ignore[operator]
    emitted.load_state_dict({name: value for name, value in model.state_dict().items() if name != "head.out.weight"})  # tied
    ids = torch.randint(0, 62, (2, 11))
    assert torch.equal(emitted(ids), model(ids))


def test_a_block_without_a_branch_is_refused() -> None:
    with pytest.raises(SpecError, match=r"layers\.0: has no branch \(give it a mixer or an ffn\)"):
        dt.build("width: 28\nvocab: 62\nlayers: [{mixer: null, ffn: null}]")


def test_a_family_that_has_a_mixer_in_every_layer_says_so() -> None:
    spec = dt.from_yaml(SPEC).rewrite("layers", lambda place: place.old[3:])
    with pytest.raises(SpecError, match=r"layers\.0\.mixer: nothing cannot be written as llama"):
        to_hf(spec, "llama")
