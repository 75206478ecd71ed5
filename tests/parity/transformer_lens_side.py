"""The other side of test_transformer_lens.py, run by the interpreter that has TransformerLens: what its hooks read.

Its argument is a directory: model/ is in Hugging Face layout, tokens.safetensors has the token ids. It writes
cache.safetensors, every floating-point activation by the name of its hook, and the logits as `logits`.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformer_lens.model_bridge import TransformerBridge
from transformers import PreTrainedTokenizerFast

place = Path(sys.argv[1])
words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"0": 0}, "0")), pad_token="0", unk_token="0")
bridge = TransformerBridge.boot_transformers(str(place / "model"), device="cpu", tokenizer=words).eval()
with torch.no_grad():
    logits, cache = bridge.run_with_cache(load_file(place / "tokens.safetensors")["tokens"])
tensors = {name: x for name, x in cache.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
save_file({name: x.contiguous().clone() for name, x in {**tensors, "logits": logits}.items()}, place / "cache.safetensors")
