"""Blocks with other branches than a mixer and an ffn: one of them alone, as in Nemotron-H, or several side by side."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

import dovetail as dt
from dovetail.base.errors import SpecError
from dovetail.hf.hf import to_hf
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


SIDE_BY_SIDE = """
width: 28
vocab: 62
layers:
- kind: hybrid_block
  mixer: {heads: 6, kv_heads: 2, head: 10}
  ssm: {kind: mamba2, head: 14}
  ffn: {hidden: 44}
- kind: expert_block
  wire: WIRE
  mixer: {heads: 7}
  ffn: {hidden: 36}
  experts: {kind: moe, hidden: 20}
"""


def test_mixers_side_by_side_read_the_same_and_have_a_state_each() -> None:
    model = dt.build(SIDE_BY_SIDE.replace("WIRE", "pre_norm"))
    ids = torch.randint(0, 62, (2, 9))
    seen = model.trace(ids, "layers.0.in", "layers.0.*_add", "layers.0.after_mixer")
    total = seen["layers.0.in"] + (seen["layers.0.mixer_add"] + seen["layers.0.ssm_add"])
    assert torch.equal(seen["layers.0.after_mixer"], total)
    stores = {branch for group in Pool(model.spec, 1, 8).groups.values() for branch in group.stores}
    assert stores == {(0, "mixer"), (0, "ssm"), (1, "mixer")}
    names = [name for name in model.state_dict() if name.startswith("layers.0.") and "norm" in name]
    assert names == ["layers.0.mixer_norm.scale", "layers.0.ffn_norm.scale", "layers.0.ssm.norm.scale"]


@pytest.mark.parametrize("wire", ["pre_norm", "post_norm", "sandwich_norm", "res_post_norm", "parallel"])
def test_an_emitted_file_of_branches_side_by_side_computes_the_same(wire: str) -> None:
    spec = dt.from_yaml(SIDE_BY_SIDE.replace("WIRE", wire)).set("layers.0.wire", {"kind": wire, "layer_scale": 0.5})
    assert dt.from_yaml(str(spec)) == spec
    model = dt.build(spec)
    scope: dict[str, object] = {"__name__": "emitted"}
    exec(compile(dt.emit(spec).text, "emitted", "exec"), scope)
    emitted = scope["Model"]().eval()  # type: ignore[operator]
    emitted.load_state_dict({name: value for name, value in model.state_dict().items() if name != "head.out.weight"})  # tied
    ids = torch.randint(0, 62, (2, 11))
    assert torch.equal(emitted(ids), model(ids))


def test_a_position_is_swapped_in_every_mixer_of_a_block() -> None:
    spec = dt.from_yaml(SIDE_BY_SIDE.replace("WIRE", "pre_norm")).set("layers.0.ssm", {"kind": "attention", "heads": 7})
    swapped = spec.swap("position", "alibi")
    assert {swapped.layers[0].mixer.position.kind, swapped.layers[0].ssm.position.kind} == {"alibi"}


SHARED = """
width: 28
vocab: 62
layers:
- {mixer: {heads: 6, kv_heads: 2, head: 10}, ffn: {kind: moe, router: ROUTER, hidden: 20}}
- {mixer: {heads: 7}}
- {repeat: 2, mixer: {heads: 6, kv_heads: 2, head: 10}, ffn: {kind: moe, router: ROUTER, hidden: 20}, shares: 0}
""".replace("ROUTER", "{kind: sigmoid_router, balance_bias: true}")


def test_layers_that_share_weights_have_them_once_and_a_state_each(tmp_path: Path) -> None:
    model = dt.build(SHARED)
    own = dt.build(SHARED.split("- {repeat")[0])
    assert dt.from_yaml(str(model.spec)) == model.spec
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in own.parameters())
    assert model.layers[3].mixer.q.weight is model.layers[0].mixer.q.weight
    assert model.layers[3].ffn.router.balance is model.layers[0].ffn.router.balance  # a buffer that balancing updates
    ids = torch.randint(0, 62, (1, 9))
    x = model.trace(ids, "layers.*.in")["layers.2.in"]
    assert not torch.equal(x, model.trace(ids, "layers.*.in")["layers.3.in"])
    stores = {layer for group in Pool(model.spec, 1, 8).groups.values() for layer, _ in group.stores}
    assert stores == {0, 1, 2, 3}
    whole = [5, 3, 7]
    for _ in range(4):
        whole.append(int(model(torch.tensor([whole]))[0, -1].argmax()))
    assert list(model.generate([5, 3, 7], max_tokens=4, temperature=0.0)) == whole[3:]
    dt.save(model, tmp_path / "saved")
    saved = safetensors.torch.load_file(tmp_path / "saved" / "model.safetensors")
    assert not [name for name in saved if name.startswith(("layers.2", "layers.3"))]
    assert torch.equal(dt.load(tmp_path / "saved")(ids), model(ids))


def test_an_emitted_file_shares_layers() -> None:
    model = dt.build(SHARED)
    scope: dict[str, object] = {"__name__": "emitted"}
    exec(compile(dt.emit(model.spec).text, "emitted", "exec"), scope)
    emitted = scope["Model"]().eval()  # type: ignore[operator]
    tied = ("head.out.weight", "layers.2.", "layers.3.")
    emitted.load_state_dict({name: value for name, value in model.state_dict().items() if not name.startswith(tied)})
    ids = torch.randint(0, 62, (2, 11))
    assert torch.equal(emitted(ids), model(ids))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("layers.1.shares", 2), r"layers\.1\.shares: layer 1 cannot use the weights of layer 2"),
        (("layers.3.shares", 2), r"layers\.3\.shares: layer 2 has no weights of its own \(give the layer that it shares: 0\)"),
        (("layers.3.ffn.hidden", 24), r"layers\.3\.ffn.*is tied to layers\.0\.ffn.*has shape"),
    ],
)
def test_a_layer_whose_weights_cannot_be_shared_is_refused(change: tuple[str, int], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        dt.build(dt.from_yaml(SHARED).set(*change))
