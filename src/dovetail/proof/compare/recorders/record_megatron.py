"""Record a model directory in Hugging Face layout as Megatron-Core runs it, loaded by Megatron Bridge. NEVER EXECUTED: written
to the source of megatron-core 0.16.1 and to the guide of Megatron Bridge (`from_hf_pretrained`, `to_megatron_provider`).

One process, no parallelism; a trainer has no KV cache, so that every row is one pass and `steps` is not used. Tensors are
(tokens, rows, …) inside, and written as (rows, tokens, …). `linear_qkv` is grouped per KV head (its queries, key, value) and
written as all queries, all keys, all values. A norm that is fused into `linear_qkv` or `linear_fc1` has no module of its own.
Recomputation would call modules twice and is off."""

import json
import sys
from importlib.metadata import version
from pathlib import Path


def main(model_dir: str, out: Path, request: dict) -> None:
    import torch
    from megatron.bridge import AutoBridge
    from safetensors.torch import save_file

    dtype = getattr(torch, request["dtype"])
    provider = AutoBridge.from_hf_pretrained(model_dir, trust_remote_code=False).to_megatron_provider()
    provider.tensor_model_parallel_size = provider.pipeline_model_parallel_size = 1
    provider.sequence_parallel, provider.recompute_granularity = False, None
    provider.params_dtype, provider.bf16, provider.fp16 = dtype, dtype == torch.bfloat16, dtype == torch.float16
    provider.finalize()
    provider.initialize_model_parallel(seed=0)
    (model,) = provider.provide_distributed_model(wrap_with_ddp=False)
    model = model.eval()
    config = getattr(model, "module", model).config
    taps: dict[str, torch.Tensor] = {}

    def ungrouped(x):
        """(…, KV heads · (queries + key + value)) as (…, queries, keys, values)."""
        groups = config.num_query_groups or config.num_attention_heads
        heads = x.unflatten(-1, (groups, config.num_attention_heads // groups + 2, -1))
        return torch.cat([heads[..., :-2, :].flatten(-3), heads[..., -2, :].flatten(-2), heads[..., -1, :].flatten(-2)], -1)

    def put(name, values):
        values = values if isinstance(values, (tuple, list)) else [values]
        tensors = [x.detach() for x in values if torch.is_tensor(x) and x.is_floating_point() and x.dim() >= 3]
        for i, x in enumerate(tensors):
            x = ungrouped(x) if name.endswith("linear_qkv") else x
            x = x.transpose(0, 1).flatten(2).cpu().contiguous()
            taps.setdefault(name if len(tensors) == 1 else f"{name}#{i}", x)

    def hooks(name):
        def before(module, args, kwargs):
            put(f"{name}.in", [*args, *(kwargs[key] for key in ("hidden_states",) if key in kwargs)])

        return before, lambda module, args, kwargs, result: put(name, result)

    for name, module in model.named_modules():
        if name and "rotary" not in name:
            before, after = hooks(name.removeprefix("module."))
            module.register_forward_pre_hook(before, with_kwargs=True)
            module.register_forward_hook(after, with_kwargs=True)
    rows = torch.tensor(request["rows"], device=next(model.parameters()).device)
    count, n = rows.shape
    places = torch.arange(n, device=rows.device).expand(count, n)
    causal = torch.ones(n, n, dtype=torch.bool, device=rows.device).triu(1)[None, None]  # true: not visible
    with torch.no_grad():
        taps["logits"] = model(rows, places, causal).float().cpu().contiguous()
    save_file(taps, out / "0.safetensors")
    one = {"files": ["0.safetensors"], "ids": rows.flatten().tolist(), "positions": places.flatten().tolist()}
    one["sequences"] = [row for row in range(count) for _ in range(n)]
    engine = f"megatron-core {version('megatron-core')}"
    data = {"format": "dovetail-dump-1", "engine": engine, "dtype": request["dtype"], "passes": [one]}
    (out / "dump.json").write_text(json.dumps(data))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text()))
