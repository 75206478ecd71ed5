"""Find the field value that makes two specs equal in budget: parameters, FLOPs per token, or bytes of decode state.

Compare architectures at equal cost: change one part, then adjust another field to compensate.

    dovetail match llama-tiny llama-tiny --swap 'mixer=mamba2' --params
    dovetail match llama-3-8b mistral-7b --kv --vary 'layers.*.mixer.kv_heads'
"""

from __future__ import annotations

from typing import Annotated

from dovetail.api.match import Budget, match
from dovetail.base.errors import UsageError
from dovetail.base.option import Option
from dovetail.cli.command import Options
from dovetail.cli.printing import print_result


def run(
    given: Options,
    json: bool,
    params: Annotated[bool, Option("Equal parameters (the default).")] = False,
    flops: Annotated[bool, Option("Equal FLOPs per token of a forward pass.")] = False,
    kv: Annotated[bool, Option("Equal bytes of decode state.")] = False,
) -> int:
    """Search, and print the field and its value; 1 where no value makes them equal within 1 %."""
    wanted: dict[Budget, bool] = {"params": params, "flops": flops, "kv": kv}
    chosen: list[Budget] = [by for by in wanted if wanted[by]] or [next(iter(wanted))]
    if len(chosen) > 1:
        raise UsageError(f"--{chosen[0]}, --{chosen[1]}: choose one budget")
    return print_result(match(**given, by=chosen[0]), json)
