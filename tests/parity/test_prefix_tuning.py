"""A prefix is what transformers computes with the same keys and values in its KV cache, before the first token: what prefix
tuning learns. Position ids count the tokens alone."""

from __future__ import annotations

import pytest
import torch
from hf_pair import Pair
from transformers import DynamicCache

from dovetail.model.construction import build
from dovetail.nn.module import tensor_at
from dovetail.proof.laws.case import perturbed

LLAMA = {
    "hidden_size": 30,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "vocab_size": 62,
    "rms_norm_eps": 1e-5,
}
SINKS = {**LLAMA, "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 64}


@pytest.mark.parametrize(("family", "fields"), [("llama", LLAMA), ("qwen3", LLAMA), ("gpt_oss", SINKS)])
@pytest.mark.parametrize("prefix", [1, 5])
def test_a_prefix_is_entries_of_a_cache(family: str, fields: dict[str, int], prefix: int) -> None:
    pair = Pair(family, fields, seed=3)
    theirs = pair.theirs.to(torch.float64)
    spec = pair.spec.set("layers.*.mixer.prefix", prefix)
    learned = perturbed(spec, 1)
    ours = build(spec, dtype=torch.float64)
    cache = DynamicCache()
    with torch.no_grad():
        for path, tensor in ours.named_parameters():
            tensor.copy_(tensor_at(learned if ".prefix_" in path else pair.ours, path))
        tokens = torch.tensor(pair.prompts([9, 9]))
        for i, layer in enumerate(ours.layers):
            k, v = (tensor_at(layer, f"mixer.prefix_{name}").unflatten(-1, (2, 10)).transpose(0, 1) for name in "kv")
            cache.update(k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1), i)
        where = torch.arange(9).expand(2, -1)
        want = theirs(tokens, past_key_values=cache, position_ids=where, cache_position=prefix + torch.arange(9)).logits
        got = ours(tokens)
    assert (got - want).abs().max() < 3e-6 * want.abs().max(), "they compute norms and rotary angles in float32"
    assert (got - pair.ours.double()(tokens)).abs().max() > 0.01, "the prefix is felt"
