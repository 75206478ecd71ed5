"""Feature maps: positive, equal at every construction, and random features that approximate softmax."""

import pytest
import torch

from dovetail.base.errors import SpecError
from dovetail.files.spec import from_yaml
from dovetail.proof.laws.oracle import alone, part
from dovetail.spec.check import advice, check
from dovetail.spec.fold import declared

KINDS = [part("elu_features"), part("relu_features"), part("random_features", features=11)]


@pytest.mark.parametrize("spec", KINDS)
def test_features_are_positive_and_finite_for_large_inputs_too(spec) -> None:
    torch.manual_seed(0)
    module = alone(spec, head=6, features=spec.count(6)).float()
    x = torch.randn(4, 5, 6) * torch.tensor([0.0, 0.1, 1.0, 5.0])[:, None, None]
    for features in (module.query(x), module.key(x)):
        assert features.shape == (4, 5, spec.count(6))
        assert bool((features >= 0).all())
        assert bool(features.isfinite().all())
    assert bool((module.query(x * 100).sum(-1) > 0).all()), "a query always has weight to give"


def test_random_features_stay_finite_at_heads_of_any_usual_size() -> None:
    for head in (64, 128, 256):
        module = alone(part("random_features"), head=head, features=2 * head).float()
        directions = module.directions.float() * head**0.25  # keys that lie on a direction have the largest features
        assert bool(module.key(directions).isfinite().all())
        assert bool((module.key(torch.zeros(head)) > 0).all())


def test_more_random_features_come_nearer_to_softmax() -> None:
    torch.manual_seed(0)
    q, k = (0.5 * torch.randn(40, 8, dtype=torch.float64) for _ in range(2))
    want = (q @ k.T / 8**0.5).softmax(-1)
    gaps = []
    for count in (8, 128, 2048):
        module = alone(part("random_features", features=count), head=8, features=count)
        weights = module.query(q) @ module.key(k).T
        gaps.append(float((weights / weights.sum(-1, keepdim=True) - want).abs().mean()))
    assert gaps[0] > 2 * gaps[1]
    assert gaps[1] > 2 * gaps[2]


def test_orthogonal_directions_are_nearer_than_independent_ones() -> None:
    """Over many draws, the squared error of the softmax kernel is smaller; small vectors, where the gain is provable."""
    torch.manual_seed(1)
    q, k = (0.2 * torch.randn(12, 16, dtype=torch.float64) for _ in range(2))
    want = (q @ k.T / 4.0).exp()

    def error(directions: torch.Tensor) -> float:
        x, y = (torch.exp(v / 2 @ directions.T - (v / 2).square().sum(-1, keepdim=True) / 2) for v in (q, k))
        return float((x @ y.T / len(directions) - want).square().mean())

    spec = part("random_features", features=16)
    scope = alone(spec, head=16, features=16).scope
    ours = [error(part("random_features", features=16, draw=i).constant("directions", scope)) for i in range(100)]
    chance = [error(torch.randn(16, 16, dtype=torch.float64)) for _ in range(100)]
    assert sum(ours) < 0.9 * sum(chance)


def test_directions_are_a_constant_of_the_spec() -> None:
    spec = from_yaml("{width: 28, layers: [{repeat: 2, mixer: {kind: linear_attention, heads: 4, feature: random_features}}]}")
    found = [d for d in declared(spec) if d.path.endswith("feature.directions")]
    assert len(found) == 2
    first, second = (d.part.constant("directions", d.scope) for d in found)
    assert torch.equal(first, second)
    assert first.shape == (14, 7)
    assert not any(d.weight.learned for d in found)


def test_errors_and_advice_name_the_field() -> None:
    text = "{{width: 28, layers: [{{mixer: {{kind: linear_attention, heads: 4, feature: {}}}}}]}}"
    few = from_yaml(text.format("{kind: random_features, features: 3}"))
    assert [path for path, _ in advice(few)] == ["layers.0.mixer.feature.features"]
    for bad, field in (
        ("{kind: relu_features, floor: 0.0}", "floor"),
        ("{kind: random_features, features: -1}", "features"),
        ("{kind: random_features, draw: -2}", "draw"),
    ):
        with pytest.raises(SpecError, match=f"layers.0.mixer.feature.{field}"):
            check(from_yaml(text.format(bad)))
