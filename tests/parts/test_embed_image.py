"""An image in front of text: patches that see each other, text that is causal behind them, generation, and wrong inputs."""

from __future__ import annotations

import pytest
import torch

from dovetail.base.errors import InputError, SpecError
from dovetail.files.spec import from_yaml
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.proof.laws.case import LAWS, Case, perturbed
from dovetail.proof.laws.suite import exceptions

SPEC = from_yaml("""
width: 28
vocab: 62
embed: {kind: tokens_and_patches, patch: 3}
layers:
- repeat: 2
  mixer:
    heads: 6
    kv_heads: 2
    head: 12
    mask: {any: [causal, {kind: prefix, length: 4}]}
    position: {kind: rope, coords: 3, sections: [1, 2, 3], when: read}
  ffn: {hidden: 44}
""")
# 2 × 2 patches at (time 0, height, width), so that text begins at 2
GRID = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]])
IDS = torch.tensor([62, 63, 64, 65, 7, 11, 3])
AT = torch.cat([GRID, torch.tensor([[2] * 3, [3] * 3, [4] * 3])])


def patches(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("law", ["causal", "chunked", "padded", "rollback", "gradient", "programs", "positions"])
def test_an_image_prefix_decoder_is_under_the_laws(law: str) -> None:
    assert not exceptions(SPEC)
    case = Case(SPEC)
    LAWS[law].check(case)
    assert case.compared > 0


def test_every_token_sees_the_whole_image_and_no_later_text() -> None:
    model, images = perturbed(SPEC), patches().requires_grad_()
    out = model(IDS[None], Ctx(layout=TokenLayout.whole(1, 7).at(AT[None]), patches=images))
    for t in (0, 3, 5):
        (grad,) = torch.autograd.grad(out[0, t].sin().sum(), images, retain_graph=True)
        assert (grad.flatten(1).abs().amax(1) > 0).all(), t
    changed = torch.cat([IDS[:6], torch.tensor([9])])
    with torch.no_grad():
        other = model(changed[None], Ctx(layout=TokenLayout.whole(1, 7).at(AT[None]), patches=images))
    assert torch.equal(other[0, :6], out[0, :6])
    assert not torch.equal(other[0, 6], out[0, 6])


def test_it_generates_from_an_image() -> None:
    model = perturbed(SPEC)
    tokens = model.generate(IDS, 12, positions=AT, patches=patches())  # type: ignore[operator]
    whole = torch.cat([IDS, torch.tensor(tokens)])
    at = torch.cat([AT, (5 + torch.arange(12))[:, None].expand(12, 3)])
    with torch.no_grad():
        logits = model(whole[None], Ctx(layout=TokenLayout.whole(1, 19).at(at[None]), patches=patches()))
    assert logits[0, 6:-1].argmax(-1).tolist() == tokens
    assert tokens != model.generate(IDS, 12, positions=AT, patches=patches(1))  # type: ignore[operator]
    with pytest.raises(SpecError, match="has 3 tokens; the first 4 see each other"):
        model.generate(IDS[:3], 2, patches=patches())  # type: ignore[operator]


def test_ids_without_a_patch_and_patches_of_another_shape_are_errors() -> None:
    model = perturbed(SPEC)
    layout = TokenLayout.whole(1, 7)
    for given in (None, patches()[:3]):
        with pytest.raises(
            InputError, match=r"embed: token id 65 is neither a token nor a patch; tokens are 0 to 61, and 62 on"
        ):
            model(IDS[None], Ctx(layout=layout, patches=given))
    with pytest.raises(InputError, match=r"patches have the shape \(4, 3, 3, 2\); give \(patches, 3, 3, 3\)"):
        model(IDS[None], Ctx(layout=layout, patches=patches()[..., :2]))
