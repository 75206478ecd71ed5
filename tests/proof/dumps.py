"""Dumps for the tests, written from modules of transformers in the form in which an engine would have them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

Taps = dict[str, Tensor]


def hooked(model: nn.Module) -> Taps:
    """The tensors of the model's last forward, by name: outputs, and inputs of modules with one tensor."""
    taps: Taps = {}

    def put(name: str, value: Any) -> None:
        value = value[0] if isinstance(value, tuple) and value else value
        if isinstance(value, Tensor) and value.is_floating_point():
            taps[name] = value.detach().clone()

    for name, module in model.named_modules():
        if name and "rotary" not in name:
            module.register_forward_hook(lambda m, a, y, name=name: put(name, y))
            module.register_forward_pre_hook(lambda m, a, name=name: put(f"{name}.in", a))
    return taps


def write_dump(
    place: Path,
    model: Any,
    rows: Tensor,
    *,
    steps: int = 0,
    change: Callable[[Taps], Taps] = lambda taps: taps,
    ranks: Callable[[Taps, int], Taps] | None = None,
    **more: Any,
) -> Path:
    """Write the passes of a model of transformers: prefill, then `steps` single tokens; `change` rewrites the tensors of a
    pass, `ranks` gives the shards of one of two ranks."""
    place.mkdir()
    taps, cache, passes, start = hooked(model), None, [], 0
    for number, size in enumerate([rows.shape[1] - steps, *[1] * steps]):
        ids = rows[:, start : start + size]
        with torch.no_grad():
            out = model(ids, past_key_values=cache, use_cache=True)
        cache, taps["logits"] = out.past_key_values, out.logits
        files = []
        for rank in range(1 if ranks is None else 2):
            tensors = change(dict(taps)) if ranks is None else ranks(change(dict(taps)), rank)
            files.append(f"{number}-{rank}.safetensors")
            save_file({name: x.contiguous().clone() for name, x in tensors.items()}, place / files[-1])
        sequences = [row for row in range(len(rows)) for _ in range(size)]
        positions = [start + i for _ in rows for i in range(size)]
        passes.append({"files": files, "ids": ids.flatten().tolist(), "sequences": sequences, "positions": positions})
        start += size
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    write_json(place, {"format": "dovetail-dump-1", "engine": "a test", "dtype": dtype, "passes": passes, **more})
    return place


def write_json(place: Path, data: dict[str, Any]) -> None:
    (place / "dump.json").write_text(json.dumps(data))


def flat(taps: Taps) -> Taps:
    """Tokens of all sequences one after the other, and rows of padding up to a multiple of 64."""
    tokens = {name: x.reshape(-1, x.shape[-1]) for name, x in taps.items()}
    return {name: torch.cat([x, torch.full((-len(x) % 64, x.shape[1]), 7.0)]) for name, x in tokens.items()}


def like_vllm(taps: Taps, layers: Sequence[int]) -> Taps:
    """Fused qkv and gate_up, and layers that return (delta, residual)."""
    found = dict(taps)
    for i in layers:
        layer, attention = f"model.layers.{i}", f"model.layers.{i}.self_attn"
        found[f"{attention}.qkv_proj"] = torch.cat([found.pop(f"{attention}.{x}_proj") for x in "qkv"], -1)
        found[f"{layer}.mlp.gate_up_proj"] = torch.cat([found.pop(f"{layer}.mlp.{x}_proj") for x in ("gate", "up")], -1)
        out = found.pop(layer)
        found[f"{layer}#0"] = found[f"{layer}.mlp.down_proj"]
        found[f"{layer}#1"] = out - found[f"{layer}.mlp.down_proj"]
        if i:
            found[f"{layer}.in#0"], found[f"{layer}.in#1"] = 0.25 * found[f"{layer}.in"], 0.75 * found.pop(f"{layer}.in")
    found = {name: x for name, x in found.items() if not name.endswith(("q_proj.in", "k_proj.in", "v_proj.in"))}
    return found
