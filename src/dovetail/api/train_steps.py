"""Steps of `train`: the checks of its options, the end of the run, its precision, its spec and its plot."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec as find_module
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.api.arguments import NamedSpec, SpecLike, read_spec
from dovetail.core.errors import FileError, UsageError, install_command
from dovetail.core.units import read_count
from dovetail.disk.model_files import RUN_FILE, TOKENIZER_FILE
from dovetail.disk.untrusted import PICKLES, Directory
from dovetail.training.metrics import StepMetrics
from dovetail.training.plan import Plan, Precision, PrecisionChoice
from dovetail.training.settings import read_run
from dovetail.views.curve import draw_losses

if TYPE_CHECKING:
    from dovetail.api.train_from import Start


def check_options(numbers: dict[str, float], prompt: str) -> None:
    """Raise UsageError for the first option with an impossible value; the plan checks the others."""
    for name, value in numbers.items():
        if not 0 <= value < math.inf:
            raise UsageError(f"--{name}: {value} is below 0")
    if not prompt:
        raise UsageError("--prompt: give at least one character")


def last_step(steps: int | None, tokens: float | str | None, per_step: int) -> int | None:
    """Return the number of steps of a run, where steps or tokens end it."""
    ends = [steps, None if tokens is None else math.ceil(read_count(tokens) / per_step)]
    return min((one for one in ends if one is not None), default=None)


def chosen_precision(choice: PrecisionChoice, place: Path | None) -> Precision:
    """Return the precision of a run: `auto` is that of a run that is resumed, else what this machine multiplies faster in."""
    import torch

    from dovetail.training.metrics import faster_precision

    if choice != "auto":
        return choice
    if place is not None and (place / RUN_FILE).is_file():
        return read_run(place).get("precision", Plan.precision)
    return faster_precision(torch.device("cpu"))


def named_spec(spec: SpecLike | None, start: Start | None) -> NamedSpec:
    """Return the spec that is given, or that of the initial weights."""
    if spec is not None:
        return read_spec(spec)
    if start is None:
        raise UsageError("give a spec, or initial weights with --from")
    return NamedSpec(str(start.place), start.spec)


def refuse_weights(place: Path) -> None:
    """Raise where the directory holds weights or a tokenizer: both would be discarded."""
    from dovetail.files.spec import SPEC_FILE

    directory = Directory(place)
    present = [name for name in directory.names() if name.endswith((".safetensors", *PICKLES, TOKENIZER_FILE))]
    if present:
        spec = f"{place / SPEC_FILE}" if directory.has(SPEC_FILE) else "a preset or a .yaml file"
        raise FileError(
            f"{place}: holds {present[0]}, which train would discard: it starts with random weights and a tokenizer; "
            f"to continue from them, give it with --from; to train this architecture from scratch, give {spec}"
        )


def plot_losses(history: list[StepMetrics], path: Path, title: str, note: Callable[[str], None]) -> None:
    """Plot the losses of a run to a file, with matplotlib."""
    if find_module("matplotlib") is None:
        note(f"the losses are not plotted without matplotlib: {install_command('plots')}")
    else:
        draw_losses(history, path, title)
