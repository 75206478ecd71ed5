"""Options that several public functions declare: paths, specs, sizes, seeds, changes of a spec.

    directory: Annotated[str | Path, InDir("A model directory.", argument=True)]
    length: Annotated[int, Length("Tokens per sequence.")] = 128

On the command line a value has a placeholder (SPEC, DIR, FILE, N) and is checked before torch is imported.
"""

from __future__ import annotations

import functools
from pathlib import Path

from dovetail.api.checks import check_directory, check_file, check_output, check_path, check_spec
from dovetail.base.dtypes import dtype_name
from dovetail.base.errors import SpecError
from dovetail.base.limits import GRAMMAR_CHARACTERS, MAX_LENGTH, MAX_NEW_TOKENS, MAX_RANKS, MAX_SEED, MAX_STEPS
from dovetail.base.option import Option
from dovetail.base.units import read_count
from dovetail.disk.untrusted import read_regular


def _dtype(text: str) -> str:
    try:
        return dtype_name(text)
    except SpecError as error:
        raise ValueError(f"{error.problem}; {error.remedy}") from None


def _run_dtype(text: str) -> str:
    if (name := _dtype(text)) == "float8":
        raise ValueError(f"{text} is a dtype only for weights; run in bfloat16 or wider")
    return name


def _schema(path: str) -> str:
    return read_regular(Path(path), GRAMMAR_CHARACTERS, "a JSON schema")


def _named(text: str) -> tuple[str, str]:
    name, equals, directory = text.partition("=")
    if not (name and equals and directory):
        raise ValueError(f"{text!r} is not NAME=DIR")
    return name, directory


Spec = functools.partial(Option, form="SPEC", read=str, check=check_spec)  # a preset, a .yaml file or a model directory
InDir = functools.partial(Option, form="DIR", read=Path, check=check_directory)
OutDir = functools.partial(Option, form="DIR", read=Path, check=check_output)
InFile = functools.partial(Option, form="FILE", read=Path, check=check_file)
InPath = functools.partial(Option, form="PATH", read=Path, check=check_path)  # a directory or a regular file
OutFile = functools.partial(Option, form="FILE", read=Path, check=check_output, new=True)  # of a function with `force`
Length = functools.partial(Option, low=1, high=MAX_LENGTH)
Ranks = functools.partial(Option, low=1, high=MAX_RANKS)
Steps = functools.partial(Option, low=1, high=MAX_STEPS)
Seed = functools.partial(Option, low=0, high=MAX_SEED)
NewTokens = functools.partial(Option, low=1, high=MAX_NEW_TOKENS)
Count = functools.partial(Option, form="N", read=read_count, low=0.0, above=True)  # 200M, 2e8
Dtype = functools.partial(Option, form="DTYPE", read=_dtype)  # torch's name
RunDtype = functools.partial(Option, form="DTYPE", read=_run_dtype)  # one that a model computes in
Sets = functools.partial(Option, form="PATH=VALUE", repeat=True)
Swaps = functools.partial(Option, form="GROUP=KIND", repeat=True)

SET = Sets("Change a field first: --set layers.*.mixer.kv_heads=1; may be given many times.")
SWAP = Swaps("Change a part in every layer: --swap position=alibi; may be given many times, applied before --set.")
SPEC = Spec("A preset's name, a .yaml file or a model directory.", argument=True)
REPLACE_MODEL = Option("Replace an existing model directory.")
OUT = OutDir("The directory to write.", short="-o")
ONLY = Option(
    "Train only the weights whose paths match this pattern: 'layers.*.mixer.prefix_*'; may be given many times.", repeat=True
)
TEMPLATE = Option("A chat template in place of the model's: a file, or plain, which writes `role: content`.")

# of functions that generate text
TEMPERATURE = Option("0 picks the most probable token; 1 samples from the model's probs as they are.", low=0.0)
TOP_P = Option("Sample from the fewest tokens whose probs sum to this.", low=0.0, high=1.0, above=True)
TOP_K = Option("Sample from the N most probable tokens.")
MIN_P = Option("Sample from the tokens that are at least this many times as probable as the most probable one.")
SCHEMA = Option("A JSON schema: the text is a JSON value of it.", form="FILE", read=_schema)
REPETITION_PENALTY = Option("Above 1, tokens of the prompt and of the text so far become less probable.")
SAMPLING_SEED = Seed("The seed of the sampling.")
EVICT = Option(
    "Hold the KV cache of full attention to a budget: drop the `oldest` token, or the least `attended` (H2O), or keep the "
    "first four as `sinks` and a window (StreamingLLM)."
)
EVICT_TO = Option("With --evict: entries per layer and sequence, 1,024 by default.", low=2, high=MAX_LENGTH)

# of servers
SERVED = InDir("A model directory: ours, or in Hugging Face layout.", argument=True)
HOST = Option("The address to listen on.")
PORT = Option("The port; 0 picks a free one.", low=0, high=65535)
SERVED_NAME = Option("The name of the model in requests; that of the directory by default.")
API_KEY = Option(
    "A key that requests must send as a bearer token; may be given many times. Other users of the machine can read "
    "it in the list of processes: --api-key-file hides it.",
    form="KEY",
    repeat=True,
)
API_KEY_FILE = InFile("A file with one API key per line.")
ROWS = Option("Continuations that run at once.", low=1, high=1024)
LONGEST = Option("Tokens of a prompt and its continuation together.", low=2, high=MAX_LENGTH)
BUDGET = Option(
    "Tokens per step of the model: longer prompts are computed in chunks, together with requests that decode.",
    low=1,
    high=1 << 20,
)
SHARE = Option("Keep the KV cache of prompts for later requests with the same prefix.")
SERVED_DTYPE = Option("The dtype of the weights; that of the files by default.")
SERVED_ADAPTER = Option(
    "An adapter that requests name as their model; may be given many times.", form="NAME=DIR", read=_named, repeat=True
)
ALLOW_HOST = Option(
    "A host name besides localhost under which the server may be reached; * allows all; may be given many times.",
    form="NAME",
    repeat=True,
)
RESTART = Option(
    "How often an engine that has ended by itself is started again; then the server ends with an error.",
    low=0,
    high=1000,
)
SPECULATE = Option(
    "`lookup`: draft the next tokens from those before; `lookahead`: from the model's own guesses at tokens further on; "
    "`mtp`: by its multi-token prediction, Medusa heads or EAGLE; or the directory of a smaller model that guesses them."
)
COMPILED = Option(
    "Decode with a compiled graph: it takes a minute or more to compile at the start, and holds the weights a second time."
)
POOLING = Option(
    "The pooling of embeddings; by default that of the model's head, else the last token of a causal model and the mean."
)

# of plans
DEVICE = Option("Their kind: a100, h100, h200, b200 or mi300x.")
TENSOR = Ranks("Fix the tensor-parallel ranks (default: each power of two within a node).")
PRICE = Option("Dollars per GPU-hour.", low=0.0, high=1000000.0, above=True)

# of changes to a trained model
OUR_MODEL = InDir("A model directory, in Dovetail's or Hugging Face's layout.", argument=True)
LAYERS = Option(
    "The old layers that make up the new model: 0-3,3,5 are six layers, layer 3 twice. --set then counts the new ones."
)
