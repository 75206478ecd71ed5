"""Record a model directory as vLLM runs it: hooks in the worker through `LLM.apply_model`, one file per forward pass.

A pass holds the tokens of all sequences one after the other. Its sequences follow from the positions: a run of positions that
begins at p continues the first sequence of p tokens. The decoded tokens are those that vLLM samples (greedily): the last
`steps` tokens of a row are not run. Logits are computed outside of the model's forward, so they are computed here."""

import functools
import json
import os
import sys
from pathlib import Path

os.environ |= {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
DEFAULTS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_HOST_IP": "127.0.0.1"}
for key, value in {**DEFAULTS, "VLLM_CPU_CI_ENV": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}.items():
    os.environ.setdefault(key, value)


def attach(model, out: str) -> None:
    """Hook every module and write a file per forward pass; runs in the worker."""
    import torch
    from safetensors.torch import save_file

    taps, passes, lengths = {}, [], []

    def put(name, values):
        tensors = [x for x in (values if isinstance(values, (tuple, list)) else [values]) if torch.is_tensor(x)]
        tensors = [x.detach().cpu().clone().contiguous() for x in tensors if x.is_floating_point()]
        for i, x in enumerate(tensors):
            taps.setdefault(name if len(tensors) == 1 else f"{name}#{i}", x)

    def hook(name):
        def before(module, args, kwargs):
            put(f"{name}.in", [*args, *(kwargs[key] for key in ("hidden_states", "residual") if key in kwargs)])

        return before, lambda module, args, kwargs, result: put(name, result)

    def sequences_of(positions):
        found, start = [], 0
        claimed: set[int] = set()
        for i in range(1, len(positions) + 1):
            if i < len(positions) and positions[i] == positions[i - 1] + 1:
                continue
            begin, count = positions[start], i - start
            row = next((k for k, n in enumerate(lengths) if n == begin and k not in claimed and begin), len(lengths))
            if row == len(lengths):
                lengths.append(0)
            lengths[row] += count
            claimed.add(row)
            found += [row] * count
            start = i
        return found

    inner = model.forward

    def forward(*args, **kwargs):
        taps.clear()
        ids, positions = kwargs.get("input_ids"), kwargs.get("positions")
        ids, positions = (args[0] if ids is None else ids), (args[1] if positions is None else positions)
        result = inner(*args, **kwargs)
        if active:
            ids, positions = ids.tolist(), positions.tolist()
            taps["logits"] = model.compute_logits(result).detach().cpu().contiguous()
            file = f"{len(passes)}.safetensors"
            save_file(dict(taps), os.path.join(out, file))
            passes.append({"files": [file], "ids": ids, "sequences": sequences_of(positions), "positions": positions})
            Path(out, "passes.json").write_text(json.dumps(passes))
        return result

    active = True
    for name, module in model.named_modules():
        if name:
            before, after = hook(name)
            module.register_forward_pre_hook(before, with_kwargs=True)
            module.register_forward_hook(after, with_kwargs=True)
    model.forward = forward


def main(model_dir: str, out: Path, request: dict) -> None:
    import vllm

    steps, rows = request["steps"], request["rows"]
    limits = {"max_model_len": len(rows[0]) + 1, "max_num_seqs": max(len(rows), 2), "max_num_batched_tokens": 2048}
    options = {"enforce_eager": True, "enable_prefix_caching": False, "skip_tokenizer_init": True, **limits}
    llm = vllm.LLM(model_dir, dtype=request["dtype"], **options)
    llm.apply_model(functools.partial(attach, out=str(out)))
    sampling = vllm.SamplingParams(temperature=0, max_tokens=steps + 1, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": row[: len(row) - steps]} for row in rows]
    llm.generate(prompts, sampling, use_tqdm=False)
    passes = json.loads((out / "passes.json").read_text())
    (out / "passes.json").unlink()
    engine = f"vllm {vllm.__version__}"
    data = {"format": "dovetail-dump-1", "engine": engine, "dtype": request["dtype"], "passes": passes}
    (out / "dump.json").write_text(json.dumps(data))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text()))
