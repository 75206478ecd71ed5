"""Linear leaves: a wrapped one changes the output on every path, and is refused where only declared weights are read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dovetail.base.errors import SpecError
from dovetail.files.model_dir import save
from dovetail.files.spec import load_spec, zoo
from dovetail.model.model import Model, ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.declared_tensors import check_declared
from dovetail.nn.module import holder
from dovetail.ops.attend import using
from dovetail.proof.laws.case import Case
from dovetail.spec.fold import declared
from dovetail.state.pool import Pool
from dovetail.training.loop import train
from dovetail.training.plan import Plan

QUICK = {"deepseek-tiny", "jamba-tiny", "nsa-tiny", "vit-tiny"}
TINY = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in zoo() if name.endswith("-tiny")]


class Adapted(nn.Module):
    """x (W + u vᵀ)ᵀ + b, around a linear leaf W, b, as an adapter of another library has it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.u = nn.Parameter(torch.arange(base.out_features, dtype=base.weight.dtype).cos()[:, None])
        self.v = nn.Parameter(torch.linspace(-1, 1, base.in_features, dtype=base.weight.dtype)[None])

    @property
    def weight(self) -> Tensor:
        """The matrix without the adapter, as peft shows it."""
        return self.base.weight

    def forward(self, x: Tensor, *given: object) -> Tensor:
        return self.base(x, *given) + (x @ self.v.T) @ self.u.T


def leaves(spec: Model) -> list[str]:
    """One path per kind of part and name of a linear leaf with one matrix."""
    first: dict[tuple[str, str, bool], str] = {}
    for d in declared(spec):
        if d.weight.name.endswith(".weight") and d.weight.same_as is None and not d.weight.batch:
            first.setdefault((d.part.kind, d.weight.name, d.path.startswith("encoder")), d.path.removesuffix(".weight"))
    return list(first.values())


def wrap(model: ModelModule, path: str) -> None:
    parent, name = holder(model, path)
    leaf = parent.get_submodule(name)
    assert isinstance(leaf, nn.Linear)
    setattr(parent, name, Adapted(leaf))


def decode(case: Case) -> Tensor:
    """The output of the last token, decoded after the others: few queries over a long cache."""
    pool = Pool(case.spec, 1, 48, dtype=torch.float64)
    out = torch.empty(0)
    for tokens in case.inputs[:1].split([case.inputs.shape[1] - 1, 1], 1):
        step = pool.step([0], [tokens.shape[1]])
        out = case.model(tokens, Ctx(layout=step.layout, views=step.views))
    return out


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
@torch.no_grad()
def test_a_wrapped_leaf_changes_the_output_on_every_path(name: str) -> None:
    spec = load_spec(name)
    decodes = spec.encoder is None and spec.order() == "causal"
    plain = Case(spec).run()
    for path in leaves(spec):
        case = Case(spec)
        wrap(case.model, path)
        adapted = case.run()
        assert not torch.allclose(adapted, plain), f"{path}: the output ignores the adapter"
        with using("reference"):
            torch.testing.assert_close(case.run(), adapted, msg=f"{path}: the reference implementation differs")
        if decodes:
            torch.testing.assert_close(decode(case), adapted[:1, -1:], msg=f"{path}: decoding differs")


def test_training_and_saving_refuse_a_wrapped_leaf(tmp_path: Path) -> None:
    case = Case(load_spec("llama-tiny"))
    check_declared(case.model, case.spec)
    wrap(case.model, "layers.1.mixer.q")
    what = "layers.1.mixer.q: is a Adapted, where the spec declares a plain linear leaf"
    with pytest.raises(SpecError, match=what):
        save(case.model, case.spec, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    with pytest.raises(SpecError, match=what):
        train(case.model, lambda step: pytest.fail("no batch is read"), lambda *_: torch.zeros(()), Plan(steps=1))  # type: ignore[arg-type]


def test_a_parameter_beside_the_declared_ones_is_refused() -> None:
    case = Case(load_spec("t5-tiny"))  # with shared tables, which are declared at every place they are used
    check_declared(case.model, case.spec)
    case.model.layers[0].mixer.lora = nn.Parameter(torch.zeros(2, 3))
    with pytest.raises(
        SpecError, match=r"layers\.0\.mixer\.lora: is a parameter of shape \(2, 3\) that the spec does not declare"
    ):
        check_declared(case.model, case.spec)
