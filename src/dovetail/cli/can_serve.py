"""Report whether an engine can serve a model, and if not, which part prevents it.

    dovetail can-serve mamba2-tiny                       # vLLM, by the plugin
    dovetail can-serve small --engine vllm --tensor 2 --json

A family that vLLM implements needs no plugin: `dovetail export` it by its name. Exit code 3: the engine cannot serve it.
"""

from __future__ import annotations

import dataclasses as dc
from typing import Literal

import tyro

from dovetail.cli.flags import LoadFlags, Ranks, Spec
from dovetail.cli.output import print_json, print_line


@dc.dataclass
class Command(LoadFlags):
    """The model and the engine."""

    model: tyro.conf.Positional[Spec]
    """A preset's name, a .yaml file or a model directory."""
    engine: Literal["native", "vllm"] = "vllm"
    """native: the engine of `dovetail serve`; vllm: our plugin in vLLM."""
    tensor: Ranks = 1
    """Ranks of tensor parallelism."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        """Check, and print the reasons."""
        from dovetail.api.can_serve import can_serve

        reasons = can_serve(self.model, self.engine, self.tensor)
        if self.json:
            print_json({"engine": self.engine, "serves": not reasons, "reasons": [reason._asdict() for reason in reasons]})
        elif reasons:
            for reason in reasons:
                print_line(str(reason))
        else:
            print_line(f"{self.engine} can serve {self.model}")
        return 3 if reasons else 0
