"""Record a model directory as mlx-lm runs it on the CPU. Modules of MLX have no hooks, and `__call__` is looked up on the
class: every class is wrapped once. Arrays are lazy: they are evaluated together after each pass, as float32."""

import json
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from safetensors.numpy import save_file


def main(model_dir: str, out: Path, request: dict) -> None:
    mx.set_default_device(mx.cpu)
    model = mlx_lm.utils.load_model(Path(model_dir))[0]
    model.set_dtype(getattr(mx, request["dtype"]))
    names = {id(module): name for name, module in model.named_modules() if name}
    taps: dict[str, mx.array] = {}

    def put(name: str, values: object) -> None:
        values = values if isinstance(values, (tuple, list)) else [values]
        arrays = [x for x in values if isinstance(x, mx.array) and mx.issubdtype(x.dtype, mx.floating)]
        for i, x in enumerate(arrays):
            taps.setdefault(name if len(arrays) == 1 else f"{name}#{i}", x.astype(mx.float32))

    def wrapped(inner):
        def call(self, *args, **kwargs):
            name = names.get(id(self))
            if name is not None:
                put(f"{name}.in", args[:1])
            result = inner(self, *args, **kwargs)
            if name is not None:
                put(name, result)
            return result

        return call

    for cls in {type(module) for _, module in model.named_modules() if isinstance(module, nn.Module)}:
        if "__call__" in vars(cls):
            cls.__call__ = wrapped(cls.__call__)
    rows = np.array(request["rows"])
    cuts, start, cache, passes = [rows.shape[1] - request["steps"], *[1] * request["steps"]], 0, make_prompt_cache(model), []
    for number, size in enumerate(cuts):
        ids = rows[:, start : start + size]
        taps.clear()
        logits = model(mx.array(ids), cache=cache)
        taps["logits"] = logits.astype(mx.float32)
        mx.eval(taps)
        save_file({name: np.ascontiguousarray(np.array(x)) for name, x in taps.items()}, out / f"{number}.safetensors")
        positions = [start + i for _ in rows for i in range(size)]
        sequences = [row for row in range(len(rows)) for _ in range(size)]
        described = {"ids": ids.flatten().tolist(), "sequences": sequences, "positions": positions}
        passes.append({"files": [f"{number}.safetensors"], **described})
        start += size
    engine = f"mlx-lm {mlx_lm.__version__}"
    data = {"format": "dovetail-dump-1", "engine": engine, "dtype": request["dtype"], "passes": passes}
    (out / "dump.json").write_text(json.dumps(data))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text()))
