"""llama4: in a packed row, attention chunks are counted from the beginning of the row, not of the document."""

import torch
from transformers import Llama4ForCausalLM, Llama4TextConfig

torch.manual_seed(0)
sizes = {"vocab_size": 62, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
more = {
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size_mlp": 40,
    "num_local_experts": 2,
    "attention_chunk_size": 7,
}
model = Llama4ForCausalLM(Llama4TextConfig(**sizes, **more, initializer_range=0.3, pad_token_id=0)).eval()
ids = torch.randint(3, 62, (1, 18))
with torch.no_grad():
    alone = model(ids[:, 9:], use_cache=False).logits
    packed = model(ids, position_ids=torch.arange(9).repeat(2)[None], use_cache=False).logits[:, 9:]
    print("gap packed:", (packed - alone).abs().max().item())
    mask = torch.tensor([[0] * 9 + [1] * 9])
    at = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    print("gap padded:", (model(ids * mask, **at).logits[:, 9:] - alone).abs().max().item())
