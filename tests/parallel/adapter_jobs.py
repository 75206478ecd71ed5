"""What test_adapters_over_ranks.py lets ranks do."""

from typing import Any

from dovetail.files.spec import from_yaml
from dovetail.proof.laws.sharded import SPLITS, How, _mesh, _run, adapted_model, make_batch
from dovetail.proof.laws.sharded_batch import gaps_of


def compare_adapted(text: str, kind: dict[str, Any], how: How, seed: int | None = None) -> dict[str, float]:
    """The differences of outputs and gradients between a whole adapted model and a sharded one; with a seed in training."""
    spec = from_yaml(text)
    whole = adapted_model(spec, 0, kind)
    batch = make_batch(spec, whole, 0)
    want = _run(whole, spec, batch, seed)
    run = SPLITS[how](adapted_model(spec, 0, kind), spec, _mesh(how))
    gaps = gaps_of(run(batch, seed), want)
    trained = [name for name, gradient in want.gradients.items() if bool(gradient.abs().max() > 0)]
    assert trained
    assert all(".adapter." in name for name in trained), "the base takes no gradient"
    return gaps
