"""The laws on every causal language model of transformers: which hold, which fail, for which class.

    python benchmarks/foreign.py [--json] [--only NAME …] [--quick] [--laws causal chunked …] [--table foreign.json [--resume]]

Each class of `MODEL_FOR_CAUSAL_LM_MAPPING` is built tiny and random: its own default config with every size made small by what
the size is called, windows short enough that the laws' 21 tokens cross their edge. A class runs in a process of its own, which
is ended when it takes too long or too much memory. What cannot be built is counted, with the reason. No row has a goal: what is
counted is the state of another library.
"""

from __future__ import annotations

import contextlib
import dataclasses as dc
import json
import multiprocessing as mp
import os
import re
import resource
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from measure import Row, arguments, progress, report

from dovetail.lawbook.foreign.laws import FOREIGN, law_names, laws_on
from dovetail.lawbook.foreign.model import Foreign
from dovetail.verification.transformers_side import transformers

SECONDS, BYTES = 90, 6 * 2**30  # processor time and memory of one class, at most
WAIT = 20 * SECONDS  # by the clock: a machine may have other work
QUICK = ("llama", "gpt2", "mamba")
LARGEST = 6_000_000  # parameters: what has more was not made tiny
WIDTH, HEADS = 48, 4

# what a size is called, and how small it is made; the first that fits counts
SMALL: tuple[tuple[str, int], ...] = (
    (r"vocab_size_per_layer_input|(.*_)?vocab_size(_per_layer_input)?|n_vocab|num_embeddings|vocab", 62),
    (r"max_position_embeddings|n_positions|n_ctx|seq_length|max_seq_len|max_sequence_length|context_length", 64),
    (r"num_(hidden_)?layers|n_layers?|num_decoder_layers|decoder_layers|encoder_layers|num_blocks", 2),
    (r"num_(key_value|kv)_heads|(.*_)?num_key_value_heads|n_head_kv|num_kv_heads|kv_heads", 2),
    (r"(num_)?(decoder_|encoder_)?attention_heads|num_attention_heads|n_heads?|num_heads|num_decoder_attention_heads", HEADS),
    (r"num_encoder_attention_heads|swa_num_attention_heads|(linear|swa)_?num_heads", HEADS),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads", 8),
    (r"hidden_size|d_model|n_embd|dim|word_embed_proj_dim|embedding_size|embed_dim|attention_hidden_size|emb_dim", WIDTH),
    (r"hidden_size_per_layer_input|per_layer_.*|laurel_rank", 8),
    (r"moe_intermediate_size|(shared_)?expert_.*intermediate_size|expert_ffn_hidden_size|shared_expert_intermediate_size", 20),
    (r"(.*_)?intermediate_size(_mlp)?|((decoder|encoder)_)?ffn_dim|ffn_hidden_size|n_inner|d_ff|feed_forward_.*size|dff", 40),
    (r"q_lora_rank|kv_lora_rank|o_lora_rank|.*_lora_rank|.*_rank", 10),
    (r"qk_rope_head_dim|rotary_dim", 4),
    (r"qk_head_dim", 12),
    (r"qk_nope_head_dim|v_head_dim|index_head_dim", 8),
    (r"index_topk", 16),
    (r"(linear_)?(num_)?(key|value)_heads|linear_num_(key|value)_heads", HEADS),
    (r"(.*_)?head_dim|head_size|attention_head_size|kv_channels|d_kv|d_head|mamba_d_head", 12),
    (r"num_experts_per_(tok|token)|top_?k|moe_top_?k|num_selected_experts|top_k_experts|num_experts_per_token|moe_k", 2),
    (r"n_group|topk_group|num_expert_group", 1),
    (r"(num|n)_(local_|routed_)?experts|moe_num_experts|zero_expert_num", 4),
    (r"(moe_)?(num|n)_shared_experts", 1),
    (r"sliding_window(_size)?|attention_window_size|local_attention|attention_chunk_size|window_size|local_window_size", 7),
    (r"chunk_size|mamba_chunk_size|mamba_chunk_len|scan_chunk_size", 8),
    (r"state_size|ssm_state_size|mamba_d_state|mamba_state_size", 6),
    (r"first_k_dense_replace|num_dense_layers|num_hash_layers|num_kv_shared_layers", 1),
    (r"lru_width|conv_dim", WIDTH),
    (r"_?sliding_window_pattern|layer_group_size|full_attention_interval|layer_types_pattern", 2),
    (r"mamba_d_ssm", 2 * WIDTH),
)
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# two layers that share one attention
SHARED = {
    "num_hidden_layers": 3,
    "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    "attention_hidden_size": 2 * WIDTH,
    "attention_head_dim": 2 * WIDTH // HEADS,
    "num_key_value_heads": HEADS,
}
SECTIONS = ROPE | {"mrope_section": [2, 2, 2]}
# what one class needs beside its sizes, by its model type
OWN: dict[str, dict[str, Any]] = {
    "reformer": {"axial_pos_shape": (8, 8), "axial_pos_embds_dim": (16, 32), "local_attn_chunk_length": 4, "is_decoder": True,
                 "attn_layers": ["local", "local"], "hidden_size": WIDTH, "attention_head_size": 12},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "big_bird": {"attention_type": "original_full"},
    "deepseek_v2": {"head_dim": 4, "num_key_value_heads": HEADS, "num_attention_heads": HEADS, "topk_method": "greedy"},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_dense": {"rope_parameters": ROPE, "head_dim": 12},
    "hunyuan_v1_moe": {"rope_parameters": ROPE, "head_dim": 12},
    "ministral": {"rope_parameters": ROPE, "head_dim": 12},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    "stablelm": {"head_dim": 12, "partial_rotary_factor": 0.5},
    "roc_bert": {"enable_pronunciation": False, "enable_shape": False},
    "nemotron": {"head_dim": 12, "num_key_value_heads": 2},
    "xlm": {"causal": True},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 12, "mamba_n_groups": 2, "attn_layer_indices": [1]},
    "mamba2": {"num_heads": 8, "head_dim": 12, "n_groups": 2, "expand": 2},
    "xlstm": {"num_heads": 4, "embedding_dim": 128, "hidden_size": 128, "qk_dim_factor": 0.5, "chunk_size": 16},
    "rwkv": {"attention_hidden_size": WIDTH, "context_length": 64},
    "xlnet": {"mem_len": 32, "attn_type": "uni"},  # the other type reads a text in both directions
    "cpmant": {"pad_token_id": 0},  # its forward knows padding by this id
    "dbrx": {"rope_theta": 10000.0, "clip_qkv": 8.0},
    "zamba": SHARED,
    "zamba2": SHARED,
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"],
                            "rope_parameters": {"sliding_attention": SECTIONS, "full_attention": SECTIONS}},
    "qwen4_exp": {"layer_types": ["linear_attention", "indexed_attention"], "indexer_n_heads": HEADS, "indexer_kv_heads": 1,
                  "indexer_head_dim": 12, "indexer_budget": 8, "indexer_compress_ratio": 2},
    "deepseek_v4": {"layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
                    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
                    "mlp_layer_types": ["hash_moe", "moe"]},
    "blt": {"encoder_hash_byte_group_vocab": 100, "hidden_size_global": WIDTH, "num_hidden_layers": 2},
}  # fmt: skip

BUG, UNUSED, LIMIT, OURS, OPEN = "wrong result", "unused weights", "documented limit", "ours", "open"
# what fails, as "model type, law, detail"; the script in foreign_failures/ that shows it without us; and what it is
KNOWN: tuple[tuple[str, str, str], ...] = (
    (r".* every_weight no gradient: [^ ]*indexer", "deepseek_indexer", LIMIT),
    (r"big_bird every_weight", "big_bird_pooler", UNUSED),
    (r"(falcon_mamba|mamba|jamba|zamba) chunked in chunks", "mamba_chunks", BUG),
    (r"bamba chunked", "bamba_step", BUG),
    (r"(nemotron_h|zamba2) chunked", "nemotron_h_step", BUG),
    (r"moshi chunked", "moshi_window", BUG),
    (r"git chunked", "git_mask", BUG),
    (r"(roberta.*|camembert|data2vec-text|xlm-roberta.*|xmod) chunked row 1", "roberta_left_padded_decode", BUG),
    (
        r"(bart|bigbird_p.*|blenderbot.*|marian|mbart|mvp|pegasus|plbart|trocr|whisper) (padded|chunked) row 1",
        "bart_left_padding",
        LIMIT,
    ),
    (r"llama4 padded document", "llama4_packed", BUG),
    (r".* padded document 1 packed", "bamba_packed", LIMIT),
    (r"rwkv chunked", "rwkv_step", BUG),
    (r"roformer .* by [0-9.]+e-(0[6-9]|[1-9]\d) of", "", OURS),  # a table of positions made in float32 is no exact rotation
    (r"cpmant", "cpmant_prompt", LIMIT),
    (r"prophetnet", "prophetnet_streams", BUG),
    (r"xlnet (chunked|padded) RuntimeError", "xlnet_mask", BUG),
    (r"(xlnet|roc_bert) every_weight", "other_inputs", LIMIT),
    (r"reformer", "reformer_chunks", LIMIT),
    (r"recurrent_gemma padded row 1", "recurrent_gemma_padding", BUG),
    (r"rwkv padded row 1", "rwkv_mask", LIMIT),
    (r"xlm padded row 1", "xlm_mask", BUG),
    (r"hrm_text gradient", "hrm_text_gradient", LIMIT),
    (r"deepseek_v4 (chunked|padded) row 1", "deepseek_v4_padding", BUG),
    (r"deepseek_v4 every_weight", "deepseek_v4_hash", LIMIT),
    (r"longcat_flash every_weight", "longcat_flash_experts", UNUSED),
    (r"blt (chunked|padded)", "blt_patches", BUG),
    (r"zaya every_weight", "", OURS),  # a random router of one expert for each token leaves some without any
)


def known(kind: str, law: dict[str, Any]) -> tuple[str, str]:
    """(script, what it is) of a failure; nothing and `open` where it was not looked into."""
    told = f"{kind} {law['law']} {law['detail']}"
    return next(((script, what) for pattern, script, what in KNOWN if re.match(pattern, told)), ("", OPEN))


@dc.dataclass
class Tried:
    """What became of one class."""

    name: str  # the model type
    model: str  # the class
    state: str  # tried, not built, ended
    reason: str = ""
    dtype: str = ""
    laws: list[dict[str, Any]] = dc.field(default_factory=list)
    seconds: float = 0.0


def small(name: str, value: Any) -> int | None:
    """How small a field of a config is made; None where it is no size."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        return None
    for pattern, size in SMALL:
        if re.fullmatch(pattern, name):
            return size
    return None


def shrunk(config_class: Any, kind: str, variant: int) -> Any:
    """A config of this class with every size small. Variants are tried in turn until one can be built."""
    first = config_class()
    words: dict[str, Any] = {}
    for name, value in vars(first).items():
        plain = name.lstrip("_")
        if plain in getattr(first, "sub_configs", {}) and value is not None:
            words[plain] = shrunk(type(value), kind, variant)
        elif (size := small(plain, value)) is not None:
            words[plain] = size
        elif isinstance(value, (int, float)) and plain.endswith(("dropout", "_pdrop")):
            words[plain] = value * 0
    taken = set(vars(first)) | set(getattr(config_class, "attribute_map", {}).values())
    words |= {name: id for name, id in SPECIAL.items() if name in taken or name in vars(first)}
    if "is_decoder" in taken or variant == 3:
        words["is_decoder"] = True
    if "qk_rope_head_dim" in words:  # latent attention: what others call head_dim is what of a key turns
        words |= {"head_dim": words["qk_rope_head_dim"]} if "head_dim" in words else {}
    if variant in (1, 3):  # heads that divide the width, as many for keys
        words |= {name: WIDTH // HEADS for name in words if name == "head_dim" and "qk_rope_head_dim" not in words}
        words |= {name: HEADS for name in words if "key_value" in name or name == "num_kv_heads"}
    if variant == 2:  # patterns of layers that are longer than two
        words |= {name: 4 for name in words if re.fullmatch(SMALL[2][0], name)}
    counts = {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
    }  # where a default is left to the checkpoint
    words |= {name: count for name, count in counts.items() if getattr(first, name, 0) is None}
    words |= OWN.get(kind, {})
    config = config_class(**words)
    config._experts_implementation = "eager"  # their grouped kernel knows no float64
    return config


def made(kind: str) -> tuple[Any, Any]:
    """The model's class and the first tiny config that it can be built from."""
    library = transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config_class = library.models.auto.configuration_auto.CONFIG_MAPPING[kind]
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    reason: Exception | None = None
    for variant in range(4):
        try:
            config = shrunk(config_class, kind, variant)
            if not isinstance(config, model_class.config_class):  # the class is the text's part of more
                config = config.get_text_config()
            with torch.device("meta"):
                count = sum(p.numel() for p in model_class(config).parameters())
            if count > LARGEST:
                raise ValueError(f"{count:,} parameters although every known size is small")
            model = model_class(config).eval()
            with torch.no_grad():
                model(torch.randint(3, 60, (2, 21)))
            return model_class, config
        except Exception as error:
            reason = reason or error
    assert reason is not None
    raise reason


def try_class(kind: str, names: list[str], told: Any) -> None:
    """In a process of its own: build the class, test the laws, and print each result at once."""
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the library's own words
    try:
        model_class, config = made(kind)
        case = Foreign(lambda: model_class(config), kind)
        told.send(("built", f"{str(case.dtype).removeprefix('torch.')}, {case.tolerance:g}"))
    except BaseException as error:
        told.send(("not built", f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"))
        return
    for found in laws_on(case, names):
        told.send(("law", dc.asdict(found)))
    told.send(("done", ""))


def one(kind: str, model: str, names: list[str]) -> Tried:
    """A class tried in a child that is ended where it takes too long."""
    hears, tells = mp.get_context("fork").Pipe(duplex=False)
    child = mp.get_context("fork").Process(target=try_class, args=(kind, names, tells), daemon=True)
    begin, tried = time.perf_counter(), Tried(kind, model, "ended", f"took more than {SECONDS} s")
    child.start()
    tells.close()
    with contextlib.suppress(EOFError):
        while hears.poll(max(WAIT - (time.perf_counter() - begin), 0)):
            what, value = hears.recv()
            if what == "built":
                tried.state, tried.reason, tried.dtype = "tried", "", value
            elif what == "not built":
                tried.state, tried.reason = "not built", value
            elif what == "law":
                tried.laws.append(value)
            if what in ("done", "not built"):
                break
    if child.is_alive():
        child.join(2)
        child.kill()
    child.join()
    if tried.state == "ended" and child.exitcode not in (-signal.SIGXCPU, -signal.SIGKILL):
        tried.reason = f"its process ended with {child.exitcode}"
    for name in names if tried.state == "tried" else ():
        if name not in {law["law"] for law in tried.laws}:
            tried.laws.append({"law": name, "state": "not tried", "detail": f"took more than {SECONDS} s", "seconds": 0})
    tried.seconds = round(time.perf_counter() - begin, 1)
    return tried


def classes(only: list[str]) -> Iterator[tuple[str, str]]:
    """(model type, class) of each; a class that stands there under several types is tried once."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as names

    seen: set[str] = set()
    for kind, model in sorted(names.items()):
        if (only and kind not in only) or (not only and model in seen):
            continue
        seen.add(model)
        yield kind, model


def figures(tried: list[Tried]) -> list[Row]:
    """How many, by law and by state."""
    rows = [
        Row("classes", len(tried)),
        Row("classes built tiny and tried", sum(one.state == "tried" for one in tried)),
        Row("classes that could not be", sum(one.state != "tried" for one in tried)),
        Row("classes with no failure", sum(one.state == "tried" and not failures(one) for one in tried)),
    ]
    labeled = [known(one.name, law) for one in tried for law in failures(one)]
    labels, faults = Counter(what for _, what in labeled), Counter(what for _, what in set(labeled))
    rows += [Row(f"failures: {what}", labels[what]) for what in (BUG, UNUSED, LIMIT, OURS, OPEN)]
    # several classes, or several laws, may fail for one cause: a cause is a script in foreign_failures/
    rows += [Row(f"distinct causes: {what}", faults[what]) for what in (BUG, UNUSED, LIMIT)]
    counts = Counter((law["law"], law["state"]) for one in tried for law in one.laws)
    return rows + [Row(f"{name}: {state}", count) for (name, state), count in sorted(counts.items())]


def failures(one: Tried) -> list[dict[str, Any]]:
    """The laws that failed."""
    return [law for law in one.laws if law["state"] == "failed"]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", nargs="*", default=[], help="model types: llama gpt2 …")
    parser.add_argument("--laws", nargs="*", default=[], help=f"these alone, of {', '.join(FOREIGN)}")
    parser.add_argument("--table", type=Path, help="write every outcome here, as JSON")
    parser.add_argument("--resume", action="store_true", help="classes that the table has are not tried again")
    asked = parser.parse_args()
    transformers()
    names = law_names(asked.laws)
    chosen = list(classes(asked.only or (list(QUICK) if asked.quick else [])))
    before = {one["name"]: Tried(**one) for one in json.loads(asked.table.read_text())} if asked.resume else {}
    tried: list[Tried] = []
    with progress("classes", len(chosen)) as tick:
        for kind, model in chosen:
            tried.append(before.get(kind) or one(kind, model, names))
            tick()
            if asked.table:
                asked.table.write_text(json.dumps([dc.asdict(one) for one in tried], indent=1, ensure_ascii=False) + "\n")
    if not asked.json:
        for each in tried:
            for law in failures(each):
                print(f"{each.name} ({each.model}): {law['law']}: {law['detail']} [{' '.join(known(each.name, law)).strip()}]")
            if each.state != "tried":
                print(f"{each.name} ({each.model}): {each.state}: {each.reason}")
    report(figures(tried), asked.json)
    sys.exit(0)


if __name__ == "__main__":
    main()
