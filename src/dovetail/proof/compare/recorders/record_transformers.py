"""Record a model directory as transformers runs it. transformers, torch and safetensors are all that is imported."""

import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file


def main(model_dir: str, out: Path, request: dict) -> None:
    dtype = getattr(torch, request["dtype"])
    options = {"dtype": dtype, "attn_implementation": "eager", "local_files_only": True, "use_safetensors": True}
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, trust_remote_code=False, **options).eval()
    taps: dict[str, torch.Tensor] = {}

    def put(name: str, values: object) -> None:
        tensors = [x for x in (values if isinstance(values, (tuple, list)) else [values]) if torch.is_tensor(x)]
        tensors = [x.detach().clone().contiguous() for x in tensors if x.is_floating_point()]
        for i, x in enumerate(tensors):
            taps.setdefault(name if len(tensors) == 1 else f"{name}#{i}", x)

    def hook(name: str):
        def after(module, args, kwargs, result):
            put(name, result)

        def before(module, args, kwargs):
            put(f"{name}.in", args or [kwargs[k] for k in ("hidden_states",) if k in kwargs])

        return before, after

    for name, module in model.named_modules():
        if name and "rotary" not in name:
            before, after = hook(name)
            module.register_forward_pre_hook(before, with_kwargs=True)
            module.register_forward_hook(after, with_kwargs=True)
    rows = torch.tensor(request["rows"])
    n = rows.shape[1]
    cuts, start, cache, passes = [n - request["steps"], *[1] * request["steps"]], 0, None, []
    for number, size in enumerate(cuts):
        ids = rows[:, start : start + size]
        taps.clear()
        with torch.no_grad():
            result = model(ids, past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        taps["logits"] = result.logits.contiguous()
        save_file(dict(taps), out / f"{number}.safetensors")
        positions = [start + i for _ in rows for i in range(size)]
        sequences = [row for row in range(len(rows)) for _ in range(size)]
        described = {"ids": ids.flatten().tolist(), "sequences": sequences, "positions": positions}
        passes.append({"files": [f"{number}.safetensors"], **described})
        start += size
    engine = f"transformers {transformers.__version__}"
    data = {"format": "dovetail-dump-1", "engine": engine, "dtype": request["dtype"], "passes": passes}
    (out / "dump.json").write_text(json.dumps(data))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text()))
