"""Runs in the environment of peers: the logits of directories by transformers, and tensors packed by compressed-tensors.

python peers_compressed.py OUT.safetensors DIR …
"""

import sys
from pathlib import Path

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

out, *directories = sys.argv[1:]
tokens = torch.arange(1, 25)[None]
found = {}
for directory in directories:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()
    with torch.no_grad():
        found[Path(directory).name] = model(tokens).logits.contiguous()
codes = torch.randint(-8, 8, (24, 40), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
eight = torch.randint(-127, 128, (24, 40), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
found |= {
    "codes4": codes,
    "packed4": pack_to_int32(codes, 4),
    "zeros4": pack_to_int32(codes[:, :5].contiguous(), 4, packed_dim=0),
}
found |= {"codes8": eight, "packed8": pack_to_int32(eight, 8)}
save_file({name: tensor.contiguous() for name, tensor in found.items()}, out)
