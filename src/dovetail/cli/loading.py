"""Progress of a load on stderr; a short load prints nothing."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dovetail.cli.output import print_error
from dovetail.views.progress import delayed_bar

if TYPE_CHECKING:
    from dovetail.hf.load import Watch


@contextmanager
def shown_loading(name: str) -> Iterator[Watch]:
    """Yield a function watch(bytes read, bytes in total) that moves a progress bar; print the warnings of the load."""
    from dovetail.hf.tensors import DroppedTensors

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default", DroppedTensors)
        with delayed_bar("reading {task.description}", name, ends=True) as watch:
            yield watch
    for warning in caught:
        print_error(f"{name}: {warning.message}")
