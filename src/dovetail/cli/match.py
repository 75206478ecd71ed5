"""Find the field value that makes two specs equal in budget: parameters, FLOPs per token, or bytes of decode state.

Compare architectures at equal cost: change one part, then adjust another field to compensate.

    dovetail match llama-tiny llama-tiny --swap 'mixer=mamba2' --params
    dovetail match llama-3-8b mistral-7b --kv --vary 'layers.*.mixer.kv_heads'
"""

from __future__ import annotations

import dataclasses as dc

import tyro

from dovetail.cli.flags import Length, LoadFlags, Sets, Spec, Swaps
from dovetail.cli.output import print_json
from dovetail.cli.printing import options, print_view


@dc.dataclass
class Command(LoadFlags):
    """The two specs, and what they shall have in common."""

    a: tyro.conf.Positional[Spec]
    """A preset's name, a .yaml file or a model directory."""
    b: tyro.conf.Positional[Spec]
    """The one whose field is changed."""
    params: bool = False
    """Equal parameters (the default)."""
    flops: bool = False
    """Equal FLOPs per token of a forward pass."""
    kv: bool = False
    """Equal bytes of decode state."""
    vary: str | None = None
    """The field of B to change, for all layers: layers.*.ffn.hidden (default: the one that changes least)."""
    length: Length | None = None
    """Tokens of the text (default: 2048, or the longest that both support)."""
    set: Sets = ()
    """Change a field of B first: --set layers.*.mixer.kv_heads=1; may be given many times."""
    swap: Swaps = ()
    """Change a part of B in every layer first: --swap position=alibi; may be given many times, applied before --set."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        """Search, and print the field and its value; 1 where no value makes them equal within 1 %."""
        from dovetail.api.match import match
        from dovetail.core.errors import UsageError
        from dovetail.weights.surgery.budget import BUDGETS, Budget

        chosen: list[Budget] = [by for by in BUDGETS if getattr(self, by)] or ["params"]
        if len(chosen) > 1:
            raise UsageError(f"--{chosen[0]}, --{chosen[1]}: choose one budget")
        result = match(**options(self, "json", "load", *BUDGETS), by=chosen[0])
        if self.json:
            print_json(result.to_dict())
        else:
            print_view(result)
        return 0 if result.equal else 1
