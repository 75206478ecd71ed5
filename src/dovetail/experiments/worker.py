"""A process that trains the runs of a lab, one after the other: `python -m dovetail.experiments.worker MODULE:FUNCTION`.

    stdin    one JSON object per line: {"place": DIR, "arguments": {…}} for FUNCTION(arguments, out=DIR, quiet=True)
    stdout   one JSON object per line: {"place": DIR, "problem": null}, after the result was written

The end of stdin ends the process at once, also in the middle of a run: a lab that was killed leaves no process behind, and the
lab that is started again resumes the run.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import queue
import statistics
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dovetail.base.errors import Diverged, DovetailError
from dovetail.disk.atomic import write_atomically
from dovetail.experiments.long_context import PROBE, measure_context, read_context
from dovetail.experiments.outside_metric import ARGUMENT, OutsideMetric, outside_report
from dovetail.experiments.results import result_file, result_text

INTERRUPTED = 130  # the exit code after a signal


def train_one(train: Callable[..., Any], place: Path, arguments: dict[str, Any]) -> None:
    """Train a run, or resume it, and write what it measured; nothing if a process that was lost has written it."""
    if result_file(place).is_file():
        return
    settings = {key: value for key, value in arguments.items() if key not in (ARGUMENT, PROBE)}
    try:
        run = train(settings, out=place, quiet=True)
    except Diverged as error:
        write_atomically(result_file(place), result_text({}, [], str(error)))
        return
    report = run.to_dict()
    if report.get("interrupted"):
        os._exit(INTERRUPTED)
    steps = [after.seconds - before.seconds for before, after in itertools.pairwise(run.history)]
    report["step_seconds"] = statistics.median(steps) if steps else None
    if ARGUMENT in arguments:
        report |= outside_report(run.model, OutsideMetric(**arguments[ARGUMENT]))
    if (probe := arguments.get(PROBE)) is not None:
        context = measure_context(run.model, read_context(probe))
        report |= {"probe_accuracy": context.accuracy(), "probe_used_length": context.used(), "probe": context.to_dict()}
    curve = [[float(at.tokens), at.seconds, at.val_loss] for at in run.history if at.val_loss is not None]
    write_atomically(result_file(place), result_text(report, curve))


def train_function(name: str) -> Callable[..., Any]:
    """The function that MODULE:FUNCTION names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def main(function: str) -> None:
    """Train what stdin asks for until it ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a run prints is not an answer
    asked: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            asked.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    train = train_function(function)
    while True:
        job, problem = json.loads(asked.get()), None
        try:
            train_one(train, Path(job["place"]), job["arguments"])
        except DovetailError as error:
            problem = str(error)
        print(json.dumps({"place": job["place"], "problem": problem}), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
