"""Build, load and save a model.

model = dt.build("llama-tiny", dtype="bfloat16", seed=3)        random weights
model = dt.build(spec, tokenizer=tokenizer)                     … of text: dt.learn_tokenizer(text, 512)
model = dt.load("Qwen3-0.6B")                                   a directory of ours, or in Hugging Face layout
dt.save(model, "my-model")                                      a directory of ours, written whole or not at all
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.api.arguments import SpecLike, read_spec
from dovetail.base.dtypes import dtype_of
from dovetail.disk.model_files import GENERATION_FILE, TOKENIZER_FILE
from dovetail.disk.untrusted import Directory

if TYPE_CHECKING:
    import torch

    from dovetail.decoding.generation import Vocabulary
    from dovetail.hf.load import Watch
    from dovetail.model.model import Model
    from dovetail.model.transformer import Transformer
    from dovetail.text.tokenizer import Tokenizer


def build(
    spec: SpecLike,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "float32",
    seed: int = 0,
    tokenizer: Tokenizer | None = None,
) -> Transformer:
    """Build a model with random weights, in evaluation mode; `model.train()` turns dropout and router noise on.

    spec: a preset's name, a .yaml file, a model directory (only its architecture), YAML text, a mapping, or a spec. device
    "meta" gives the structure without memory, for any size. Equal seeds give bit-equal weights. With a `tokenizer`
    (`learn_tokenizer`) the model reads and writes text, and ends it at the tokenizer's end token; the decoder of an
    encoder–decoder starts from that token.
    """
    from dovetail.model import construction

    resolved = read_spec(spec).spec
    vocabulary = None if tokenizer is None else _vocabulary(tokenizer, resolved)
    model = construction.build(resolved, dtype=dtype_of(dtype), device=device, seed=seed)
    model.vocabulary = vocabulary
    return model


def _vocabulary(tokenizer: Tokenizer, spec: Model) -> Vocabulary:
    """Return the vocabulary of a model with a tokenizer; texts end at its end token if it has one."""
    import json

    from dovetail.decoding.generation import Vocabulary
    from dovetail.text.tokenizer import END
    from dovetail.training.source import check_vocab

    check_vocab(tokenizer.size, spec, "dt.build")
    end = tokenizer.engine.token_to_id(END)
    if end is None:
        return Vocabulary(tokenizer)
    ids = {"eos_token_id": end} | ({} if spec.encoder is None else {"decoder_start_token_id": end})
    start = () if spec.encoder is None else (end,)
    return Vocabulary(tokenizer, frozenset([end]), start, files={GENERATION_FILE: json.dumps(ids).encode()})


def load(
    directory: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    watch: Watch | None = None,
    adapter: str | Path | None = None,
) -> Transformer:
    """Load the model of a directory, ours or in Hugging Face layout, with its tokenizer if it has one.

    `adapter` is an adapter directory, of ours or of peft, to attach to it; one that was trained on another base is refused. A
    directory that holds only an adapter is loaded with the base that it names.

    Weights stay in the dtype of the files, bit for bit, unless `dtype` names another. No code in the directory is executed.
    `watch` is called with (bytes read, bytes in all). Tensors that are not imported are reported by a DroppedTensors warning.
    """
    from dovetail.hf import load as loading
    from dovetail.hf.adapter import base_place, family_of, is_adapter, load_adapter
    from dovetail.hf.files import read_vocabulary

    if adapter is None and is_adapter(directory):
        directory, adapter = base_place(directory), directory
    model = loading.load(directory, watch=watch)
    model.vocabulary = read_vocabulary(Directory(directory))
    if adapter is not None:
        load_adapter(model, adapter, family=family_of(directory))
    return model.to(device=device, dtype=None if dtype is None else dtype_of(dtype))


def save(model: Transformer, directory: str | Path) -> None:
    """Write a model as a directory of ours, with its tokenizer and the files it was loaded with; whole or not at all. An
    existing model directory is replaced. Weights that are not finite are refused."""
    from dovetail.files import model_dir

    vocabulary = model.vocabulary
    files: dict[str, bytes] = {} if vocabulary is None else dict(vocabulary.files)
    if vocabulary is not None and vocabulary.tokenizer is not None:
        files.setdefault(TOKENIZER_FILE, vocabulary.tokenizer.to_json().encode())
    model_dir.save(model, model.spec, directory, files)
