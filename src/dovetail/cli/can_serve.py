"""Report whether an engine can serve a model, and if not, which part prevents it.

    dovetail can-serve mamba2-tiny                       # vLLM, by the plugin
    dovetail can-serve small --engine vllm --tensor 2 --json

A family that vLLM implements needs no plugin: `dovetail export` it by its name. Exit code 3: the engine cannot serve it.
"""

from __future__ import annotations

from dovetail.cli.command import Options
from dovetail.cli.output import print_json, print_line


def run(given: Options, json: bool) -> int:
    """Check, and print the reasons."""
    from dovetail.api.can_serve import can_serve

    reasons, engine = can_serve(**given), given.get("engine", "vllm")
    if json:
        print_json({"engine": engine, "serves": not reasons, "reasons": [reason._asdict() for reason in reasons]})
    elif reasons:
        for reason in reasons:
            print_line(str(reason))
    else:
        print_line(f"{engine} can serve {given['model']}")
    return 3 if reasons else 0
