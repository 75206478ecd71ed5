"""The other side of test_sae_lens.py, run by the interpreter that has SAELens.

Its argument is a directory: ours/ is a sparse autoencoder that we wrote, x.safetensors has activations. It writes ours/ again
(again/), two of its own with random weights (plain/, and rescaled/ by its trainer, whose activations are in units of the length
of their feature), and features.safetensors: what each encodes the activations as, and decodes them to.
"""

import sys
from pathlib import Path

import torch
from sae_lens import SAE, TopKSAE, TopKSAEConfig, TopKTrainingSAE, TopKTrainingSAEConfig
from safetensors.torch import load_file, save_file

place = Path(sys.argv[1])
x = load_file(place / "x.safetensors")["x"]
ours = SAE.load_from_disk(place / "ours")
ours.save_model(place / "again")
sizes = {"d_in": ours.cfg.d_in, "d_sae": ours.cfg.d_sae + 1, "k": ours.cfg.k + 1}
plain = TopKSAE(TopKSAEConfig(**sizes))
trained = TopKTrainingSAE(TopKTrainingSAEConfig(**sizes, rescale_acts_by_decoder_norm=True))
torch.manual_seed(0)
for sae in (plain, trained):
    sae.cfg.metadata.hook_name = "blocks.1.hook_resid_pre"
    for parameter in sae.parameters():
        parameter.data = torch.randn_like(parameter)
plain.save_model(place / "plain")
trained.save_inference_model(place / "rescaled")
results = {}
with torch.no_grad():
    for name in ("ours", "plain", "rescaled"):
        sae = SAE.load_from_disk(place / name)
        results |= {f"{name} features": (z := sae.encode(x)), f"{name} decoded": sae.decode(z)}
save_file({name: tensor.contiguous() for name, tensor in results.items()}, place / "features.safetensors")
