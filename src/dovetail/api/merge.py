"""Merge adapters into the weights of a model.

Several adapters are combined: linear adds what they change, ties keeps the largest changes that agree in sign, dare keeps a
random fraction of each. An adapter that was trained on another base is refused.

    dovetail merge base my-adapter -o merged
    dovetail merge base french code --method ties --weights 1 0.5 -o both --hf
    dovetail merge my-adapter
"""

from __future__ import annotations

import dataclasses as dc
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from dovetail.api.options import REPLACE_MODEL, InDir, OutDir, Seed
from dovetail.api.result import Result
from dovetail.base.errors import UsageError
from dovetail.base.option import Option
from dovetail.disk.untrusted import Directory
from dovetail.views.blocks import View

if TYPE_CHECKING:
    from dovetail.hf.load import Watch
    from dovetail.model.transformer import Transformer


@dc.dataclass(frozen=True, repr=False)
class MergedModel(Result):
    """The model that was written, the adapters in it, and how many leaves they changed."""

    model: Transformer
    source: Path
    adapters: tuple[str, ...]
    leaves: int
    directory: Path | None

    def to_dict(self) -> dict[str, Any]:
        written = None if self.directory is None else str(self.directory)
        return {"directory": written, "source": str(self.source), "adapters": list(self.adapters), "leaves": self.leaves}

    def view(self, width: int) -> View:
        where = "" if self.directory is None else f": written to {self.directory}"
        return f"{self.source} + {' + '.join(self.adapters)}{where}, {self.leaves} matrices changed"


def merge(
    directory: Annotated[
        str | Path,
        InDir(
            "A model directory, in Dovetail's or Hugging Face's layout; or an adapter directory, to merge into the base it "
            "names.",
            argument=True,
        ),
    ],
    *adapters: Annotated[str | Path, Option("Adapter directories, of Dovetail or of peft.", form="ADAPTER", argument=True)],
    out: Annotated[str | Path | None, OutDir("The model directory to write; DIRECTORY-merged by default.", short="-o")] = None,
    method: Annotated[Literal["linear", "ties", "dare"], Option("How several adapters are combined.")] = "linear",
    weights: Annotated[Sequence[float], Option("A factor for each adapter (default: 1).")] = (),
    density: Annotated[float, Option("With ties and dare: the fraction of each adapter's changes that is kept.")] = 0.5,
    seed: Annotated[int, Seed("The seed of dare.")] = 0,
    any_base: Annotated[bool, Option("Also merge an adapter that was trained on another base.")] = False,
    hf: Annotated[bool, Option("Write Hugging Face's layout.")] = False,
    force: Annotated[bool, REPLACE_MODEL] = False,
    watch: Watch | None = None,
) -> MergedModel:
    """Merge adapters into the weights of a model, and write it to `out`, in Hugging Face layout with `hf`.

    Without adapters `directory` is an adapter directory, which is merged into the base that it names. Several adapters are
    combined by `method`: linear adds their changes, ties and dare keep a fraction `density` of each
    (weights/adapters/lora.py). `weights` has one factor for each adapter, 1 by default. An adapter of another base is
    refused, unless with `any_base`.
    """
    from dovetail.files.model_dir import must_be_free
    from dovetail.hf import load as loading
    from dovetail.hf.adapter import base_place, family_of, is_adapter, load_adapter
    from dovetail.hf.write import model_pieces, write_own, write_theirs
    from dovetail.weights.adapters.attach import merge_adapters
    from dovetail.weights.adapters.lora import combine

    if not adapters and is_adapter(directory):
        directory, adapters = base_place(directory), (directory,)
    if not adapters:
        raise UsageError("give the adapter directories to merge, after the model")
    factors = list(weights) or [1.0] * len(adapters)
    if len(factors) != len(adapters):
        raise UsageError(f"--weights: {len(factors)} factors for {len(adapters)} adapters; give one for each")
    if out is not None:
        must_be_free(Path(out), force)
    model = loading.load(directory, watch=watch)
    attach = [functools.partial(load_adapter, model, one, any_base=any_base, family=family_of(directory)) for one in adapters]
    leaves = merge_adapters(model, attach, factors, functools.partial(combine, method=method, density=density, seed=seed))
    if out is not None:
        source = Directory(directory)
        if hf:
            write_theirs(model.part, model_pieces(model), source, out)
        else:
            write_own(model, source, out)
    names = tuple(str(adapter) for adapter in adapters)
    return MergedModel(model, Path(directory), names, leaves, None if out is None else Path(out))
