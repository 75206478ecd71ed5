"""Runs in the environment of peers: products by torchao's tensors of 8 bits.

python peers_torchao.py IN.safetensors OUT.safetensors
"""

import sys

import torch
from safetensors.torch import load_file, save_file
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    quantize_,
)

CONFIGS = {
    "int8": Int8WeightOnlyConfig(),
    "int8_dynamic": Int8DynamicActivationInt8WeightConfig(),
    "fp8": Float8WeightOnlyConfig(),
}
given = load_file(sys.argv[1])
found = {}
for name, config in CONFIGS.items():
    w = given[f"{name}.w"]
    layer = torch.nn.Sequential(torch.nn.Linear(*reversed(w.shape), bias=False))
    layer[0].weight = torch.nn.Parameter(w)
    quantize_(layer, config)
    weight = layer[0].weight
    with torch.no_grad():
        found |= {f"{name}.codes": weight.qdata, f"{name}.scale": weight.scale, f"{name}.y": layer(given["x"])}
save_file({name: tensor.contiguous() for name, tensor in found.items()}, sys.argv[2])
