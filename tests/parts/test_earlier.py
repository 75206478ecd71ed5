"""Values across layers: shared keys and values, and value residuals, against the same model written in plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dovetail as dt
from dovetail.base.errors import SpecError
from dovetail.state.pool import Pool

SPEC = """
width: 28
vocab: 62
layers:
- {mixer: {heads: 6, kv_heads: 2, head: 10, qk_norm: rmsnorm}, ffn: {hidden: 44}}
- {mixer: {heads: 4, kv_heads: 2, head: 10, earlier: {kind: value_residual, layer: 0}}, ffn: {hidden: 36}}
- {mixer: {heads: 4, kv_heads: 2, head: 10, qk_norm: rmsnorm, earlier: {kind: shared_kv, layer: 0}}, ffn: {hidden: 44}}
- {mixer: {heads: 8, kv_heads: 2, head: 10, earlier: {kind: shared_kv, layer: 1}}, ffn: {hidden: 44}}
"""


@pytest.fixture
def model() -> dt.Transformer:
    made = dt.build(SPEC, dtype="float64")
    torch.nn.init.normal_(made.layers[1].mixer.earlier.mix)
    return made


def rotated(x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[1])[:, None] * 10000.0 ** (-torch.arange(5, dtype=torch.float64) / 5)
    a, b, cos, sin = *x.chunk(2, -1), angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def norm(x: Tensor, module: torch.nn.Module) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], module.scale, 1e-5)


def by_hand(model: dt.Transformer, ids: Tensor) -> Tensor:
    """The logits, layer by layer; keys and values of every layer are kept in lists."""
    x = model.embed.table[ids]
    ks: list[Tensor] = []
    vs: list[Tensor] = []
    for i, block in enumerate(model.layers):
        h, mixer = norm(x, block.mixer_norm), block.mixer
        q = mixer.q(h).unflatten(-1, (-1, 10))
        q = rotated(norm(q, mixer.q_norm) if i in (0, 2) else q)
        if i < 2:
            k, v = (leaf(h).unflatten(-1, (-1, 10)) for leaf in (mixer.k, mixer.v))
            ks.append(rotated(norm(k, mixer.k_norm) if i == 0 else k))
            mix = mixer.earlier.mix if i else None
            vs.append(v if mix is None else mix[0] * v + mix[1] * vs[0])
        k, v = (kept[(0, 1, 0, 1)[i]].repeat_interleave(q.shape[2] // 2, 2) for kept in (ks, vs))
        z = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        x = x + mixer.o(z.transpose(1, 2).flatten(-2))
        h, ffn = norm(x, block.ffn_norm), block.ffn
        x = x + ffn.down(F.silu(ffn.gate(h)) * ffn.up(h))
    return norm(x, model.norm) @ model.embed.table.T


def test_it_is_the_model_written_by_hand(model: dt.Transformer) -> None:
    ids = torch.randint(0, 62, (2, 9))
    torch.testing.assert_close(model(ids), by_hand(model, ids), rtol=1e-12, atol=1e-12)
    gradients = []
    for logits in (model(ids), by_hand(model, ids)):
        model.zero_grad()
        logits.square().sum().backward()
        gradients.append([weight.grad.clone() for weight in model.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-10, atol=1e-10)


def test_a_shared_cache_is_stored_once_and_decodes(model: dt.Transformer, tmp_path: Path) -> None:
    pool = Pool(model.spec, 1, 8)
    assert {place for group in pool.groups.values() for place in group.stores} == {(0, "mixer"), (1, "mixer")}
    whole = [5, 3, 7]
    for _ in range(4):
        whole.append(int(model(torch.tensor([whole]))[0, -1].argmax()))
    assert list(model.generate([5, 3, 7], max_tokens=4, temperature=0.0)) == whole[3:]
    names = [name.split(".")[3] for name in model.state_dict() if name.startswith("layers.2.mixer.")]
    assert names == ["q", "o", "q_norm"]
    dt.save(model, tmp_path / "saved")
    ids = torch.randint(0, 62, (1, 7))
    assert torch.equal(dt.load(tmp_path / "saved")(ids), model(ids))


def test_a_block_returns_what_later_blocks_read(model: dt.Transformer) -> None:
    assert [len(block.io.wanted) for block in model.layers[:2]] == [2, 2]
    assert [[read.name for _, read in block.io.reads] for block in model.layers] == [[], ["v"], ["k", "v"], ["k", "v"]]
    assert dt.build("llama-tiny").layers[0].io is None


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("layers.2.mixer.earlier.layer", 3, "layers.2.mixer: reads k of layers.3.mixer, which does not run before it"),
        ("layers.2.mixer.earlier.layer", 2, "layers.2.mixer: reads k of layers.2.mixer, which does not run before it"),
        ("layers.3.mixer.earlier.layer", 2, "layers.3.mixer: reads k of layers.2.mixer, which publishes nothing"),
        ("layers.0.mixer.head", 12, r"layers.1.mixer: reads v of layers.0.mixer as \(2, 10\); it is \(2, 12\)"),
        ("layers.0.mixer.mask", ["causal", {"kind": "window", "size": 3}], "layers.2.mixer.mask: reads the cache of layers.0"),
        ("layers.2.mixer.packed", True, "layers.2.mixer.packed: there are no keys and values to pack"),
        ("layers.0.mixer", "mamba", "layers.1.mixer: reads v of layers.0.mixer, which publishes nothing"),
    ],
)
def test_what_cannot_be_read_is_refused(path: str, value: object, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        dt.build(dt.from_yaml(SPEC).set(path, value))


def test_a_file_that_cannot_say_it_is_refused() -> None:
    with pytest.raises(SpecError, match=r"layers\.1\.mixer\.earlier: .*(no writer|cannot yet pass)"):
        dt.emit(dt.from_yaml(SPEC))
