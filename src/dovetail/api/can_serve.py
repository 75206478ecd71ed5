"""Report whether an engine can serve a model, and if not, which part prevents it.

    dovetail can-serve mamba2-tiny                       # vLLM, by the plugin
    dovetail can-serve small --engine vllm --tensor 2 --json

A family that vLLM implements needs no plugin: `dovetail export` it by its name. Exit code 3: the engine cannot serve it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from dovetail.api.arguments import SpecLike, read_spec
from dovetail.api.options import SPEC, Ranks
from dovetail.api.result import Result
from dovetail.base.errors import SpecError
from dovetail.base.option import Option
from dovetail.views.blocks import View

if TYPE_CHECKING:
    from dovetail.serving.can_serve import Reason


class Obstacles(Result, list["Reason"]):
    """The reasons why an engine cannot serve a model."""

    def __init__(self, name: str, engine: str, reasons: Iterable[Reason]) -> None:
        super().__init__(reasons)
        self.name, self.engine = name, engine

    @property
    def exit_code(self) -> int:
        return SpecError.exit_code if self else 0

    def to_dict(self) -> dict[str, Any]:
        return {"engine": self.engine, "serves": not self, "reasons": [reason._asdict() for reason in self]}

    def view(self, width: int) -> View:
        return "\n".join(map(str, self)) or f"{self.engine} can serve {self.name}"


def can_serve(
    model: Annotated[SpecLike, SPEC],
    engine: Annotated[
        Literal["native", "vllm"], Option("native: the engine of `dovetail serve`; vllm: our plugin in vLLM.")
    ] = "vllm",
    tensor: Annotated[int, Ranks("Ranks of tensor parallelism.")] = 1,
) -> Obstacles:
    """Return the reasons why an engine cannot serve a model on `tensor` ranks; an empty list if it can.

    `native` is the engine of `dovetail serve`, which takes every model that generates; `vllm` is our plugin in vLLM, which
    takes what vLLM's attention layer can compute. Each reason has a path, a problem and a remedy. vLLM is not imported. A
    family that vLLM has itself needs no plugin: export it by its name.
    """
    from dovetail.serving.can_serve import can_serve as reasons

    named = read_spec(model)
    return Obstacles(named.name, engine, reasons(named.spec, engine, tensor))
