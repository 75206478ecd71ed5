"""LoRA of peft on a Llama of transformers: for each number of steps on stdin, trains so many and answers with a line."""

import json
import sys
from importlib.metadata import version

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

sizes = json.loads(sys.argv[1])
torch.set_num_threads(sizes["threads"])
config = LlamaConfig(
    hidden_size=sizes["width"],
    num_hidden_layers=sizes["layers"],
    num_attention_heads=sizes["heads"],
    num_key_value_heads=sizes["kv_heads"],
    intermediate_size=sizes["hidden"],
    vocab_size=sizes["vocab"],
    tie_word_embeddings=False,
    attn_implementation="sdpa",
)
lora = LoraConfig(r=sizes["rank"], lora_alpha=32, target_modules="all-linear")
model = get_peft_model(LlamaForCausalLM(config), lora).train()
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=sizes["rate"], betas=(0.9, 0.95), weight_decay=0.1, fused=True)
ids = torch.randint(0, sizes["vocab"], (sizes["rows"], sizes["tokens"] + 1), generator=torch.Generator().manual_seed(0))
inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
settings = {"compiled": False, "attention": "sdpa", "optimizer": "fused AdamW", "targets": "all-linear", **sizes}
print(json.dumps({"peft": version("peft"), "transformers": version("transformers"), **settings}), flush=True)
for line in sys.stdin:
    for _ in range(int(line)):
        logits = model(input_ids=inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(loss.item(), flush=True)
