"""The families that can be read and written: one file each, registered by its name here.

A file `llama.py` defines its dialect as `LLAMA`.
"""

from importlib import import_module

from dovetail.hf.table import Dialect

# a spec that several families can express is written as the first of them
FILES = (
    *("llama", "gpt2", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "olmo2", "granite", "starcoder2"),
    *("smollm3", "gpt_neox", "gptj", "opt", "bloom", "falcon", "stablelm", "mpt", "gemma3", "bert", "t5"),
    *("roberta", "distilbert", "bart", "vit", "modernbert", "dinov2", "mixtral", "mamba", "mamba2", "qwen3_moe"),
    *("deepseek_v3", "gpt_oss", "qwen3_next", "jamba", "arcee", "seed_oss", "helium", "glm", "glm4", "ernie4_5"),
    *("cohere", "cohere2", "exaone4", "olmo3", "ministral", "olmoe", "phi", "persimmon", "codegen"),
    *("gpt_bigcode", "mt5", "xlm_roberta", "camembert", "granitemoe", "granitemoeshared", "granitemoehybrid"),
    *("nemotron", "hunyuan_v1_dense", "xglm", "biogpt", "qwen2_moe", "gpt_neo", "albert", "electra"),
    *("qwen2_vl_text", "falcon_h1", "nemotron_h", "gemma4"),
)


def _dialect(file: str) -> Dialect:
    return vars(import_module(f"{__name__}.{file}"))[file.upper()]


DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in map(_dialect, FILES)}
