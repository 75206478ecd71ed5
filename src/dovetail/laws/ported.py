"""Law 13: to Hugging Face and back is bit for bit, and the logits agree, wherever Hugging Face can express the spec.

The reference library is asked only here and in tests, and only where it is installed.
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dovetail.build import build
from dovetail.core.errors import SpecError
from dovetail.core.fold import declared
from dovetail.core.module import tensor_at
from dovetail.laws.case import DTYPE, Case, NotApplicable, law
from dovetail.model import Model
from dovetail.port.hf import Ported, export_tensors, from_hf, import_tensors, to_hf
from dovetail.spec import from_yaml

# the reference computes angles and norms in float32 whatever the dtype, so float64 agrees no further than that
REFERENCE = 2e-6
FILE = "model.safetensors"


ROPES = (
    "rope",
    {"kind": "rope", "base": 100.0, "scaling": {"kind": "linear_scaling", "factor": 2.0}},
    {"kind": "rope", "scaling": {"kind": "llama3", "original": 16, "factor": 4.0}},
    {"kind": "rope", "scaling": {"kind": "yarn", "original": 16, "factor": 4.0}},
)
LLAMA = """
width: 30
vocab: 62
layers: [{repeat: 2, mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}}]
"""
GPT2 = """
width: 30
vocab: 62
position: {kind: learned, length: 64}
layers:
- repeat: 2
  norm: layernorm
  mixer: {heads: 6, position: none, bias: true, out_bias: true}
  ffn: {kind: mlp, act: gelu_tanh}
norm: layernorm
"""


def known_to_reference() -> list[Model]:
    """Small specs that Hugging Face can express; a random wiring hardly ever is."""
    llama, gpt2 = from_yaml(LLAMA), from_yaml(GPT2)
    made = [llama.set("layers.*.mixer.position", rope) for rope in ROPES]
    made += [llama.set("head.tied", False).set("layers.*.mixer.kv_heads", heads) for heads in (1, 3, None)]
    biased = llama.set("layers.*.mixer.bias", True).set("layers.*.mixer.out_bias", True)
    return [*made, biased, gpt2, gpt2.set("layers.*.ffn.act", "relu"), gpt2.set("head.tied", False)]


@law(13, "ported", "to Hugging Face and back is bit for bit, and the logits agree")
@torch.no_grad()
def ported(case: Case) -> None:
    """Our weights in their model, their answer against ours; then back again."""
    try:
        ours = to_hf(case.spec, length=64)
    except SpecError as cannot:
        case.true(bool(cannot.path), f"the refusal does not say which part it is about: {cannot}")
        raise NotApplicable(str(cannot)) from cannot
    if importlib.util.find_spec("transformers") is None:
        raise NotApplicable("transformers is not installed")
    stored = {d.path: tensor_at(case.model, d.path).detach() for d in declared(case.spec) if d.weight.stored}
    theirs = export_tensors(case.spec, stored)
    back = import_tensors(case.spec, theirs)
    for path, tensor in stored.items():
        case.same(back[path], tensor, f"{path} there and back", 0.0)
    case.true(build(from_hf(ours.config), device="meta").part.width == case.spec.width, "the config read back is another model")
    case.same(case.run(), reference_logits(ours, theirs, case.inputs), "our answer and theirs", REFERENCE)


def reference_logits(ported: Ported, tensors: dict[str, Tensor], inputs: Tensor) -> Tensor:
    """What the reference library's model answers with these weights, in float64. It reads them from files: what it holds
    itself may be laid out otherwise."""
    import transformers

    tokens = {f"{name}_token_id": None for name in ("bos", "eos", "pad")}  # theirs may lie beyond a small vocabulary
    settings = {**ported.config, **tokens}
    settings.pop("model_type", None)
    auto = getattr(transformers, ported.form.auto)
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as place:
        transformers.AutoConfig.for_model(ported.dialect, **settings).save_pretrained(place)
        save_file({name: t.contiguous() for name, t in tensors.items()}, Path(place) / FILE, metadata={"format": "pt"})
        eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
        made, told = auto.from_pretrained(place, dtype=DTYPE, output_loading_info=True, **eager)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not told[what], f"the reference has {what}: {told[what]}"
    return made.eval()(inputs).logits
