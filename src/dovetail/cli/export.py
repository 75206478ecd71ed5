"""Convert a model directory to Hugging Face layout: config.json, and tensors under a family's names.

The family is the one the model was imported from, or the first that can express the spec; where none can, the error names the
part that cannot be written. `dovetail port` lists the families.

    dovetail export llama-tiny-trained -o llama-tiny-hf
    dovetail export small -o small-gptq --layout gptq   # of a model that `dovetail quantize` wrote
    dovetail export run-1 --step 1200 -o run-1-hf       # a checkpoint of a run
    dovetail export mixed -o mixed-vllm --family dovetail   # any spec that vLLM's attention can compute, for our plugin in vLLM
"""

from __future__ import annotations

import dataclasses as dc
from typing import Annotated, Literal

import tyro

from dovetail.cli.flags import InDir, LoadFlags, OutDir, Steps
from dovetail.cli.output import print_json
from dovetail.cli.printing import options, print_view


@dc.dataclass
class Command(LoadFlags):
    """The two directories, and the family."""

    directory: tyro.conf.Positional[InDir]
    """A model directory, or with --step that of a training run."""
    out: Annotated[OutDir, tyro.conf.arg(aliases=["-o"])]
    """The directory to write."""
    family: str | None = None
    """The model_type to write, one of those that `dovetail port` lists; dovetail: the spec itself, for our plugin in vLLM."""
    layout: Literal["compressed-tensors", "gptq", "awq"] = "compressed-tensors"
    """How weights of fewer bits are written; gptq and awq hold only int4."""
    step: Steps | None = None
    """Export the checkpoint of a training run after this step, which may still be running."""
    force: bool = False
    """Replace an existing model directory."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        """Convert, and print the family."""
        from dovetail.api.export import export
        from dovetail.cli.loading import shown_loading

        with shown_loading(self.directory.name) as watch:
            result = export(**options(self, "json", "load"), watch=watch)
        if self.json:
            print_json(result.to_dict())
        else:
            print_view(result)
        return 0
