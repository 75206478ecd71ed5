"""Plan the training of a model on many GPUs, before anything runs: layouts that fit, memory, traffic, step time, days, cost;
or, with --serve, the serving of it: sequences that fit, requests per second, and the GPUs that some users need.

Memory and bytes come from the training step itself, run as one rank of the job on a process group that exchanges nothing, with
tensors that have no values. Time is a roofline on the figures of a device. --html writes a page with a picture of the layout.

    dovetail plan llama-3-70b --gpus 1024 --device h100 --length 8192 --tokens 15T --price 2.5
    dovetail plan llama-3-405b --gpus 16384 --tensor 8 --pipeline 16 --batch 2048 --html plan.html
    dovetail plan llama-3-70b --serve --device h100 --prompt 1024 --answer 256 --users 1M --price 2.5
"""

from __future__ import annotations

from typing import Annotated

from dovetail.base.errors import UsageError
from dovetail.base.option import Option, declared
from dovetail.cli.command import Options, call
from dovetail.cli.printing import Printer


def run(
    given: Options,
    printer: Printer,
    serve: Annotated[bool, Option("Plan the serving of the model.")] = False,
) -> int:
    """Print the plan; exit with 1 where no layout fits."""
    from dovetail.api.plan import plan
    from dovetail.api.plan_serving import plan_serving

    if other := next((name for name in given if name not in declared(plan_serving if serve else plan)), None):
        remedy = "leave it out, or --serve" if serve else "also give --serve"
        raise UsageError(f"--{other}: is a flag of plans for {'training' if serve else 'serving'}; {remedy}")
    if serve:
        return printer.end(plan_serving(**given))
    if "gpus" not in given:
        raise UsageError("--gpus: give the number of GPUs to train on, or --serve")
    return printer.end(call(plan, {**given, "watch": printer.event}))
