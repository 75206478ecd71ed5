"""The other side of test_peft.py, run by the interpreter that has peft: reads a job as JSON and saves logits in float64.

Its first argument is a directory: base/ is a model in Hugging Face layout, ours/ an adapter that we wrote. It saves the logits
of base + ours, and trains nothing: theirs/ is an adapter of peft with random values, whose logits it saves, too.
"""

import json
import sys
from pathlib import Path

import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from dovetail.proof.compare.float64 import float32_islands_widened

place = Path(sys.argv[1])
ids = torch.arange(14).view(2, 7)


def base() -> torch.nn.Module:
    """The base in float64."""
    with float32_islands_widened():  # rotary angles are computed here
        return AutoModelForCausalLM.from_pretrained(place / "base", dtype=torch.float64, experts_implementation="eager").eval()


def logits(model: torch.nn.Module) -> torch.Tensor:
    """Logits of the ids."""
    with torch.no_grad(), float32_islands_widened():
        return model(input_ids=ids).logits.contiguous()


found = {"base": logits(base())}
for job in json.loads((place / "jobs.json").read_text()):
    name = job["name"]
    found[f"ours {name}"] = logits(PeftModel.from_pretrained(base(), place / f"ours-{name}").double())
    config = (IA3Config if job["type"] == "IA3" else LoraConfig)(**job["config"])
    torch.manual_seed(1)
    theirs = get_peft_model(base(), config).double().eval()
    for parameter in theirs.parameters():
        if parameter.requires_grad:
            parameter.data += 0.3 * torch.randn_like(parameter)
    theirs.save_pretrained(place / f"theirs-{name}")
    found[f"theirs {name}"] = logits(theirs)
save_file(found, place / "logits.safetensors")
