"""Linear attention: its recurrence is the quadratic form written out, and its state does not grow."""

import pytest
import torch

from dovetail.base.errors import SpecError
from dovetail.files.spec import from_yaml
from dovetail.model.construction import build
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.ops.implementation import using
from dovetail.proof.laws.case import perturbed
from dovetail.spec.check import check
from dovetail.spec.fold import attention_flops, state_values

FEATURES = ["elu_features", "{kind: relu_features, floor: 0.1}", "{kind: random_features, features: 11}"]


def spec(feature: str = "elu_features", **more: object):
    fields = "".join(f", {name}: {value}" for name, value in more.items())
    layer = f"{{mixer: {{kind: linear_attention, heads: 4, feature: {feature}{fields}}}, ffn: null}}"
    return from_yaml(f"{{width: 28, vocab: 62, layers: [{layer}], head: null}}")


@pytest.mark.parametrize("feature", FEATURES)
def test_parallel_form_equals_recurrent_form(feature: str) -> None:
    mixer = perturbed(spec(feature)).layers[0].mixer
    x = torch.randn(2, 17, 28, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    q, k, v = ((getattr(mixer, name)(x)).view(2, 17, 4, 7).transpose(1, 2) for name in "qkv")
    weights = (mixer.feature.query(q) @ mixer.feature.key(k).mT).tril()
    want = mixer.o((weights / weights.sum(-1, keepdim=True) @ v).transpose(1, 2).flatten(-2))
    for name in ("reference", "torch"):
        with using(name):
            assert (mixer(x, Ctx(layout=TokenLayout.whole(2, 17))) - want).abs().max() < 1e-12


def test_state_is_features_by_value_and_independent_of_n() -> None:
    for feature, count in zip(FEATURES, (7, 7, 11), strict=True):
        made = spec(feature)
        assert state_values(made, 10) == state_values(made, 10_000) == 4 * count * (7 + 1)
        assert attention_flops(made, 2000)[0] == 2 * attention_flops(made, 1000)[0]


def test_a_row_of_nothing_but_padding_is_finite_and_so_is_its_gradient() -> None:
    model = build(spec(), dtype=torch.float64)
    tokens = torch.arange(12).view(2, 6)
    out = model(tokens, Ctx(layout=TokenLayout.padded([0, 4], 6, left=True)))
    out.sum().backward()
    assert bool(out.isfinite().all())
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def test_bfloat16_sums_many_tokens_in_float32() -> None:
    """A running sum in bfloat16 stops at 256, where adding 1 changes nothing."""
    model = build(spec(), dtype=torch.bfloat16)
    x = torch.ones(1, 2000, 28, dtype=torch.bfloat16)
    y = model.layers[0].mixer(x, Ctx(layout=TokenLayout.whole(1, 2000)))
    assert (y[:, -1] - y[:, 0]).abs().max() <= 2**-7 * y[:, 0].abs().max(), "a mean of equal values is that value"


def test_errors_name_the_field() -> None:
    for bad, field in (({"head": -1}, "head"), ({"bias": "false, heads: 5"}, "heads")):
        text = ", ".join(f"{name}: {value}" for name, value in bad.items())
        with pytest.raises(SpecError, match=f"layers.0.mixer.{field}"):
            check(from_yaml(f"{{width: 28, layers: [{{mixer: {{kind: linear_attention, {text}}}}}]}}"))
