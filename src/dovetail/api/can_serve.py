"""can_serve: the reasons why an engine cannot serve a model, each with the path of the part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from dovetail.api.arguments import SpecLike, read_spec

if TYPE_CHECKING:
    from dovetail.serving.can_serve import Reason
from dovetail.api.options import SPEC, Ranks
from dovetail.core.option import Option


def can_serve(
    model: Annotated[SpecLike, SPEC],
    engine: Annotated[
        Literal["native", "vllm"], Option("native: the engine of `dovetail serve`; vllm: our plugin in vLLM.")
    ] = "vllm",
    tensor: Annotated[int, Ranks("Ranks of tensor parallelism.")] = 1,
) -> list[Reason]:
    """Return the reasons why an engine cannot serve a model on `tensor` ranks; an empty list if it can.

    `native` is the engine of `dovetail serve`, which takes every model that generates; `vllm` is our plugin in vLLM, which
    takes what vLLM's attention layer can compute. Each reason has a path, a problem and a remedy. vLLM is not imported. A
    family that vLLM has itself needs no plugin: export it by its name.
    """
    from dovetail.serving.can_serve import can_serve as reasons

    return reasons(read_spec(model).spec, engine, tensor)
