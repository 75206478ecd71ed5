"""Law 23: leaves in another storage act on every path, or are refused by their name."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest
import torch

from dovetail.base.errors import SpecError
from dovetail.nn.linear import Linear
from dovetail.parallel.shard import tensor_parallel
from dovetail.proof.laws.case import Case
from dovetail.proof.laws.mutant import spec
from dovetail.proof.laws.replaced import LowRank, added, leaves, with_leaves, with_sums

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

EXPERTS = spec().set("layers.*.ffn", {"kind": "moe", "experts": 4, "hidden": 20, "bias": True})
LATENT = spec().set("layers.*.mixer", {"kind": "mla", "heads": 6, "kv_rank": 5, "nope": 6, "rope": 8, "value": 7})


def test_every_matrix_of_a_model_is_a_leaf() -> None:
    found = {path.partition(".")[2].partition(".")[2] or path for path, _ in leaves(with_sums(Case(EXPERTS)))}
    ffn = {f"ffn.bank.{name}" for name in ("gate", "up", "down")} | {"ffn.router.out"}
    assert found == {*(f"mixer.{name}" for name in "qkvo"), *ffn, "head.out"}


@pytest.mark.slow
@pytest.mark.parametrize("model", [spec(), EXPERTS, LATENT], ids=["attention", "experts", "mla"])
def test_compiled_models_use_replaced_leaves(model) -> None:
    case = Case(model)
    want = with_sums(case)(case.inputs, case.ctx())
    got = torch.compile(with_leaves(case), fullgraph=True, backend="aot_eager")(case.inputs, case.ctx())
    case.same(got, want, "compiled leaves and stored sums")


class OneAxis:
    """All that is asked of a mesh before the leaves are."""

    ndim = 1


def test_tensor_parallel_refuses_a_replaced_leaf_by_its_name() -> None:
    with pytest.raises(
        SpecError, match=r"layers\.0\.mixer\.\w+: is stored as LowRank, where the spec declares a plain linear leaf"
    ):
        tensor_parallel(with_leaves(Case(LATENT)), LATENT, cast("DeviceMesh", OneAxis()))


def test_a_leaf_computes_in_the_dtype_of_its_input() -> None:
    leaf = Linear((5, 3), bias=True).to_empty(device="cpu").bfloat16()
    torch.nn.init.normal_(leaf.weight)
    torch.nn.init.normal_(leaf.bias)
    x = torch.randn(2, 3)
    assert torch.equal(leaf(x), torch.nn.functional.linear(x, leaf.weight.float(), leaf.bias.float()))


def test_what_is_added_depends_on_the_path() -> None:
    model = with_sums(Case(spec()))
    leaf = model.layers[0].mixer.q
    one, other = added("layers.0.mixer.q", leaf, 0), added("layers.1.mixer.q", leaf, 0)
    assert not torch.equal(one[0], other[0])
    assert isinstance(with_leaves(Case(spec())).head.out.storage, LowRank)
