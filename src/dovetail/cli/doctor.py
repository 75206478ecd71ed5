"""Print the data for a bug report: versions, processor, threads, memory, and which optional packages are installed.

With --node, test instead whether this machine computes and stores correctly, before it joins a training run: exact matmuls on
every device, memory, and the disk of a directory. A node that fails exits with 1.

    dovetail doctor --json
    dovetail doctor --node runs && torchrun … -m dovetail train run.yaml
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from dovetail import __version__
from dovetail.base.installation import examined, text
from dovetail.base.option import Option
from dovetail.cli.command import Options
from dovetail.cli.output import print_json, print_line
from dovetail.cli.printing import print_result

Node = Annotated[Path | None, Option("Test this node, and the disk of this directory.", form="DIR")]


def run(given: Options, json: bool, node: Node = None) -> int:
    """Examine the machine and print the report; exit code 4 if a required package, or this one, is not installed, 1 if the
    node fails."""
    if node is not None:
        from dovetail.api.check_node import check_node

        return print_result(check_node(node, **given), json)
    report = {**examined(__version__), "kernel": _kernel()}
    if json:
        print_json(report, indent=2)
    else:
        print_line(text(report))
    installed = [package["installed"] for package in report["packages"]]
    return 0 if installed and all(installed) else 4


def _kernel() -> str:
    try:
        from dovetail.ops.few_rows import state
    except ImportError:
        return "torch cannot be imported"
    return state() or "ready"
