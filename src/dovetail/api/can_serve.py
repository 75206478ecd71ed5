"""can_serve: the reasons why an engine cannot serve a model, each with the path of the part."""

from __future__ import annotations

from dovetail.api.arguments import SpecLike, read_spec
from dovetail.serving.can_serve import Reason, can_serve as reasons


def can_serve(model: SpecLike, engine: str = "vllm", tp: int = 1) -> list[Reason]:
    """Return the reasons why an engine cannot serve a model on `tp` ranks; an empty list if it can.

    `native` is the engine of `dovetail serve`, which takes every model that generates; `vllm` is our plugin in vLLM, which
    takes what vLLM's attention layer can compute. Each reason has a path, a problem and a remedy. vLLM is not imported. A
    family that vLLM has itself needs no plugin: export it by its name.
    """
    return reasons(read_spec(model).spec, engine, tp)
