"""Write a Llama in Hugging Face layout as one GGUF file, in the environment of llama.cpp (benchmarks/peers/make llama.cpp).

    python write_gguf.py DIR OUT.gguf --dtype f32 [--vocabulary]

Sizes, eps and the rope base are those of config.json. With --vocabulary, byte-level BPE is read from tokenizer.json; without it
tokens go in and out as ids. No code of llama.cpp's converter is used: it asks for torch and for a list of known tokenizers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
TYPES = {"f32": gguf.GGMLQuantizationType.F32, "bf16": gguf.GGMLQuantizationType.BF16}
FILE_TYPES = {"f32": gguf.LlamaFileType.ALL_F32, "bf16": gguf.LlamaFileType.MOSTLY_BF16}


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from halves, as Hugging Face pairs channels, to neighbors, as llama.cpp pairs them."""
    return weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(directory: Path, out: Path, dtype: str, *, vocabulary: bool = False) -> Path:
    """The model of a directory as one GGUF file."""
    config = json.loads((directory / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_file_type(FILE_TYPES[dtype])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope_base(config))
    writer.add_vocab_size(config["vocab_size"])
    if vocabulary:
        add_vocabulary(writer, json.loads((directory / "tokenizer.json").read_text()), config)
    else:
        writer.add_tokenizer_model("no_vocab")
    for name, value in load_file(directory / "model.safetensors").items():
        value = value.astype(np.float32)
        if name in OUTER:
            target = OUTER[name]
        else:
            _, _, layer, *middle, leaf = name.split(".")
            target = f"blk.{layer}.{NAMES['.'.join(middle)]}.{leaf}"
        if ".attn_q." in target or ".attn_k." in target:
            value = interleaved(value, heads if ".attn_q." in target else kv_heads)
        kind = TYPES[dtype] if value.ndim > 1 else TYPES["f32"]
        writer.add_tensor(target, gguf.quants.quantize(np.ascontiguousarray(value), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def rope_base(config: dict[str, Any]) -> float:
    """The rope base, from where transformers 5 writes it or from the top level."""
    return float((config.get("rope_parameters") or {}).get("rope_theta") or config.get("rope_theta") or 10_000.0)


def add_vocabulary(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    """Tokens and merges of byte-level BPE; nothing is put before a prompt."""
    by_id = {number: name for name, number in tokenizer["model"]["vocab"].items()}
    special = {added["id"]: added["content"] for added in tokenizer["added_tokens"]}
    by_id |= special
    size, types = config["vocab_size"], gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([by_id.get(i, f"<unused {i}>") for i in range(size)])
    writer.add_token_types(
        [types.CONTROL if i in special else types.NORMAL if i in by_id else types.UNUSED for i in range(size)]
    )
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in tokenizer["model"]["merges"]])
    eos = config.get("eos_token_id")
    bos = config.get("bos_token_id")
    if eos is not None:
        writer.add_eos_token_id(eos)
        writer.add_bos_token_id(eos if bos is None else bos)  # else llama.cpp takes id 11, an ordinary token here
    writer.add_add_bos_token(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=TYPES, default="f32")
    parser.add_argument("--vocabulary", action="store_true")
    given = parser.parse_args()
    write_gguf(given.directory, given.out, given.dtype, vocabulary=given.vocabulary)


if __name__ == "__main__":
    main()
