"""Record a model directory as SGLang runs it, by its documented `forward_hooks`. NEVER EXECUTED: written to the source of
sglang 0.5.23 (`srt/model_executor/hook_manager.py`, `srt/models/llama.py`).

A hook spec names modules by pattern and a factory of this file; the scheduler's process imports it, so this folder is put on
PYTHONPATH. The root module is called as `.forward`, which runs no hook: a pass is begun by the inner `model`, which has the ids
and positions, and ended by `logits_processor`, which gives the logits of the last token of each sequence. Modules without
children are recorded: a decoder layer returns its delta alone, and the residual is kept in the batch. Hooks run on the eager
path alone, so that CUDA graphs are off. The decoded tokens are those that SGLang samples (greedily)."""

import json
import os
import sys
from pathlib import Path

TAPS: dict = {}  # module -> [(suffix, tensors)]
PASSES: list = []
LENGTHS: list = []
STATE: dict = {"names": {}, "tokens": None}
RECORDING = "recording"  # a file in the folder of the dump, there while requests run: passes of a warm-up are not recorded


def put(module, suffix, values):
    import torch

    values = values if isinstance(values, (tuple, list)) else [values]
    tensors = [x.detach().cpu().clone().contiguous() for x in values if torch.is_tensor(x) and x.is_floating_point()]
    if tensors:
        TAPS.setdefault(module, {}).setdefault(suffix, tensors)


def leaf_hook(config):
    """Record the inputs and outputs of modules without children."""

    def hook(module, inputs, output):
        if next(module.children(), None) is None:
            put(module, ".in", inputs)
            put(module, "", output)

    return hook


def inner_hook(config):
    """Learn the names of the modules, and the ids and positions of the pass."""

    def hook(module, inputs, output):
        STATE["names"] = {inside: f"{config['name']}.{name}" for name, inside in module.named_modules() if name}
        STATE["tokens"] = inputs[0].tolist(), inputs[1].tolist()

    return hook


def logits_hook(config):
    """Write the pass."""
    from safetensors.torch import save_file

    out = Path(config["out"])

    def hook(module, inputs, output):
        if not (out / RECORDING).exists():
            TAPS.clear()
            return
        tensors = {"logits": output.next_token_logits.detach().float().cpu().contiguous()}
        for inside, taps in TAPS.items():
            name = STATE["names"].get(inside)
            for suffix, values in taps.items() if name else ():
                labels = [f"{name}{suffix}"] if len(values) == 1 else [f"{name}{suffix}#{i}" for i in range(len(values))]
                tensors |= dict(zip(labels, values, strict=True))
        TAPS.clear()
        ids, positions = STATE["tokens"]
        file = f"{len(PASSES)}.safetensors"
        save_file(tensors, out / file)
        PASSES.append({"files": [file], "ids": ids, "sequences": sequences_of(positions), "positions": positions})
        (out / "passes.json").write_text(json.dumps(PASSES))

    return hook


def sequences_of(positions):
    """A run of positions that begins at p continues the first sequence of p tokens."""
    found, start, claimed = [], 0, set()
    for i in range(1, len(positions) + 1):
        if i < len(positions) and positions[i] == positions[i - 1] + 1:
            continue
        begin, count = positions[start], i - start
        row = next((k for k, n in enumerate(LENGTHS) if n == begin and k not in claimed and begin), len(LENGTHS))
        if row == len(LENGTHS):
            LENGTHS.append(0)
        LENGTHS[row] += count
        claimed.add(row)
        found += [row] * count
        start = i
    return found


def main(model_dir: str, out: Path, request: dict) -> None:
    import sglang

    here = Path(__file__).resolve()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    specs = [
        {"target_modules": ["model.*"], "hook_factory": f"{here.stem}:leaf_hook"},
        {"target_modules": ["model"], "hook_factory": f"{here.stem}:inner_hook", "config": {"name": "model"}},
        {"target_modules": ["logits_processor"], "hook_factory": f"{here.stem}:logits_hook", "config": {"out": str(out)}},
    ]
    plain = {
        "disable_radix_cache": True,
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "skip_tokenizer_init": True,
    }
    engine = sglang.Engine(model_path=model_dir, dtype=request["dtype"], tp_size=1, forward_hooks=specs, **plain)
    steps, rows = request["steps"], request["rows"]
    (out / RECORDING).touch()
    sampling = {"temperature": 0, "max_new_tokens": steps + 1, "ignore_eos": True}
    engine.generate(input_ids=[row[: len(row) - steps] for row in rows], sampling_params=sampling)
    engine.shutdown()
    (out / RECORDING).unlink()
    passes = json.loads((out / "passes.json").read_text())
    (out / "passes.json").unlink()
    version = f"sglang {sglang.__version__}"
    data = {"format": "dovetail-dump-1", "engine": version, "dtype": request["dtype"], "passes": passes}
    (out / "dump.json").write_text(json.dumps(data))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text()))
