"""Look: a hypothesis about a model, tested in one line. Traces, interventions and sweeps over activations by address.

    dt.look.trace(model, ids, "layers.3.mixer.pattern[head=5, query=-1]")
    dt.look.trace(model, ids, "head.logits", patch={"layers.3.mixer.z[head=5]": 0.0})
    dt.look.sweep(model, clean, corrupt, over="layers.*.resid[pos]", metric=margin)

Names are resolved when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dovetail.base.public_names import public_modules

if TYPE_CHECKING:
    from dovetail.look.address import addresses as addresses
    from dovetail.look.autoencoder import SAE as SAE, load_sae as load_sae, train_sae as train_sae
    from dovetail.look.components import attribute as attribute
    from dovetail.look.effects import Effect as Effect, effect as effect, token_rows as token_rows
    from dovetail.look.findings import Finding as Finding, Findings as Findings, traits as traits
    from dovetail.look.gradient import (
        gradient_times_input as gradient_times_input,
        integrated_gradients as integrated_gradients,
    )
    from dovetail.look.intervention import (
        freeze as freeze,
        from_run as from_run,
        mean_of as mean_of,
        noise as noise,
        project_out as project_out,
        resample as resample,
        steer as steer,
    )
    from dovetail.look.lenses import TunedLens as TunedLens, lens as lens, tuned_lens as tuned_lens
    from dovetail.look.mixing import patterns as patterns, rollout as rollout, routing as routing
    from dovetail.look.probing import Probe as Probe, probe as probe
    from dovetail.look.record import Trace as Trace
    from dovetail.look.relations import repeated as repeated
    from dovetail.look.residual import unembed as unembed
    from dovetail.look.streaming import read_stream as read_stream, stream as stream
    from dovetail.look.sweeps import (
        ablate as ablate,
        attribution_patching as attribution_patching,
        path_patching as path_patching,
        skip_layers as skip_layers,
        sweep as sweep,
    )
    from dovetail.look.tracer import trace as trace


ABOVE = {"report": "dovetail.api.report"}  # of a room above: what `dovetail look` prints


def __getattr__(name: str) -> Any:
    modules = public_modules(__name__)
    if name in modules:
        return getattr(importlib.import_module(modules[name]), name)
    if name in ABOVE:
        from dovetail.base.option import public_function

        return public_function(getattr(importlib.import_module(ABOVE[name]), name))
    raise AttributeError(f"dovetail.look has no {name!r}")


def __dir__() -> list[str]:
    return sorted([*public_modules(__name__), *ABOVE])
