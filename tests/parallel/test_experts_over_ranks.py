"""Experts over two ranks, whole ones or a slice of each: outputs, added losses and all gradients are those of one rank."""

import pytest
from expert_jobs import experts_over_ranks
from shard_specs import decoder

from dovetail.base.errors import SpecError
from dovetail.files.spec import from_yaml
from dovetail.parallel.pair import Pair
from dovetail.parallel.placement import Cut, placed, tp_regions
from dovetail.spec.fold import declared

ROUTER = "kind: sigmoid_router, top_k: 2, balance_bias: true, balance_loss: 0.7, z_loss: 0.1, noise: 0.3, capacity: 1.0"
FFN = f"kind: moe, experts: 6, hidden: 20, bias: true, limit: 2.0, router: {{{ROUTER}}}"
SHARED = f"{FFN}, shared: {{kind: glu, hidden: 36}}, shared_gate: true"


@pytest.mark.parametrize(("whole", "held"), [((), (3, 20, 28)), (("experts",), (6, 10, 28))], ids=["experts", "slices"])
@pytest.mark.parametrize("ffn", [FFN, SHARED], ids=["routed", "shared"])
def test_shared_out_equals_whole(pair: Pair, ffn: str, whole: tuple[str, ...], held: tuple[int, ...]) -> None:
    for found in pair.run(experts_over_ranks, decoder(ffn=ffn), whole):
        assert found["held"] == held
        assert found["loss"] < 1e-12
        assert found["losses"] < 1e-12
        assert found["load"] == 0.0
        assert any("router.out.weight" in name for name in found["gradients"])
        assert max(found["gradients"].values()) < 1e-9, max(found["gradients"].items(), key=lambda item: item[1])


def test_a_rank_whose_experts_no_token_chose_takes_part(pair: Pair) -> None:
    # its backward pass left out one collective, so that the ranks met in different ones
    ffn = FFN.replace(", capacity: 1.0", "")
    for found in pair.run(
        experts_over_ranks, decoder("kind: mamba2, inner: 36, head: 3, state_size: 5, bias: true", ffn=ffn), (), 3
    ):
        assert found["used"] == 3
        assert found["loss"] < 1e-12
        assert max(found["gradients"].values()) < 1e-9, max(found["gradients"].items(), key=lambda item: item[1])


def cuts(ffn: str, ranks: int, whole: frozenset[str] = frozenset()) -> dict[str, Cut | None]:
    spec = from_yaml(decoder(ffn=ffn))
    inside = [d for d in declared(spec) if d.path.startswith("layers.0.ffn.")]
    cut = placed(inside, list(tp_regions(spec, whole=whole)), ranks)
    return {d.path.removeprefix("layers.0.ffn."): cut for d, _, cut in cut}


def test_placements_follow_from_the_batch_axis() -> None:
    between, inside = cuts(SHARED, 2), cuts(SHARED, 2, frozenset({"experts"}))
    for name in (*(f"{part}.{leaf}" for part in ("gate", "up", "down") for leaf in ("weight", "bias")), "expert_number"):
        assert between[f"bank.{name}"] == Cut(0, 2)
    assert (inside["bank.up.weight"], inside["bank.down.weight"], inside["bank.up.bias"]) == (Cut(1, 2), Cut(2, 2), Cut(1, 2))
    assert inside["bank.down.bias"] is inside["bank.expert_number"] is None
    for found in (between, inside):
        assert found["router.out.weight"] is found["router.balance"] is found["shared_gate.weight"] is None
        assert (found["shared.up.weight"], found["shared.down.weight"]) == (Cut(0, 2), Cut(1, 2))


@pytest.mark.parametrize(("experts", "ranks"), [(2, 4), (3, 2)])
def test_an_expert_on_two_ranks_would_count_twice(experts: int, ranks: int) -> None:
    with pytest.raises(SpecError, match=f"experts = {experts} cannot be cut over {ranks}"):
        cuts(f"kind: moe, experts: {experts}, hidden: 20, router: {{kind: softmax_router, top_k: 2}}", ranks)
