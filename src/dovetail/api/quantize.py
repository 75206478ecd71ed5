"""Store the matrices of a model in fewer bits: a smaller model directory, which every verb opens.

Embedding, norms, routers and head stay as they are. rtn rounds each value to the nearest level and needs no text. gptq and awq
read calibration text, layer by layer: gptq lets the codes of a row compensate for each other's errors, awq gives inputs with
large activations finer steps. With --text the perplexity is measured on the last twentieth of the file, before and after.

    dovetail quantize llama-tiny-trained --bits 4 --method gptq --text plays.txt -o small
    dovetail quantize llama-tiny-trained --format nf4 -o small
    dovetail generate small "Once upon"
"""

from __future__ import annotations

import dataclasses as dc
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from dovetail.api.models import load, save
from dovetail.api.options import OUR_MODEL, REPLACE_MODEL, InFile, Length, OutDir, Seed
from dovetail.api.result import Result
from dovetail.core.errors import FileError, SpecError, UsageError
from dovetail.core.option import BatchSize, Option
from dovetail.core.units import size
from dovetail.disk.untrusted import Directory
from dovetail.views.blocks import TextTable, View

if TYPE_CHECKING:
    import torch

    from dovetail.data.corpus import Corpus
    from dovetail.hf.load import Watch
    from dovetail.model import Model
    from dovetail.ops.formats.format import Format
    from dovetail.transformer import Transformer
    from dovetail.weights.quantization.method import MethodResult

GROUPS = (64, 32, 16, 8)  # inputs that share a scale, the first that divides every matrix
BATCH = 8  # sequences per calibration batch
DECODED = 24  # tokens over which the speed is measured, after as many of a prompt
FORMATS = {8: "int8", 4: "int4"}  # by bits


@dc.dataclass(frozen=True)
class Measured:
    """One form of the model: bytes of its weights, perplexity on held-out text, tokens per second of decoding."""

    bytes: int
    perplexity: float | None
    tokens_per_second: float | None


@dc.dataclass(frozen=True, repr=False, eq=False)
class Quantized(Result):
    """The quantized model, and what changed."""

    model: Transformer
    format: Format
    method: str
    applied: MethodResult
    before: Measured
    after: Measured
    directory: Path | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "directory": None if self.directory is None else str(self.directory),
            "format": self.format.to_data(),
            "method": self.method,
            "leaves": self.applied.leaves,
            "folded": self.applied.folded,
            "before": dc.asdict(self.before),
            "after": dc.asdict(self.after),
        }

    def view(self, width: int) -> View:
        rows = [
            (name, size(one.bytes), _figure(one.perplexity, ".4g"), _figure(one.tokens_per_second, ".1f"))
            for name, one in (("before", self.before), ("after", self.after))
        ]
        columns = ("", "weights", "perplexity", "tokens/s")
        fields = ", ".join(f"{name} {value}" for name, value in self.format.to_data().items() if name != "kind")
        done = f"{self.applied.leaves} matrices as {self.format.kind} ({fields}) by {self.method}"
        folded = f"; {self.applied.folded} with a folded scale per input" if self.applied.folded else ""
        lines = [done + folded, "", TextTable(columns, rows, right=columns[1:])]
        if self.before.perplexity is None:
            lines.append("\nperplexity: not measured; give --text FILE")
        if self.directory is not None:
            lines.append(f"\nwritten to {self.directory}")
        return lines


def _figure(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def quantize(
    model: Annotated[str | Path | Transformer, OUR_MODEL],
    *,
    bits: Annotated[
        int | None,
        Option(
            "Bits per weight: 4, the default, is int4 in groups with a scale each; 8 is int8 with a scale per output channel."
        ),
    ] = None,
    format: Annotated[
        Literal["int4", "int8", "nf4", "fp8"] | dict[str, Any] | Format | None, Option("Another format, in place of --bits.")
    ] = None,
    group: Annotated[
        int | None, Length("Inputs that share a scale; by default 64, or fewer if 64 does not divide every matrix.")
    ] = None,
    activations: Annotated[
        Literal["int8"] | None,
        Option("With --bits 8: also round each token that a matrix reads to 8 bits, and multiply integers."),
    ] = None,
    method: Annotated[
        Literal["rtn", "gptq", "awq"] | None, Option("How codes are chosen; by default gptq with --text, else rtn.")
    ] = None,
    text: Annotated[str | Path | None, InFile("A UTF-8 text file for calibration and perplexity.")] = None,
    samples: Annotated[int, BatchSize("Sequences of calibration.")] = 128,
    length: Annotated[int, Length("Tokens per sequence.")] = 512,
    skip: Annotated[
        Sequence[str],
        Option("Leaves to keep unquantized: --skip '*.mixer.o'; may be given many times.", form="PATTERN", repeat=True),
    ] = (),
    out: Annotated[
        str | Path | None, OutDir("The model directory to write; DIRECTORY-quantized by default.", short="-o")
    ] = None,
    force: Annotated[bool, REPLACE_MODEL] = False,
    seed: Annotated[int, Seed("The seed of the calibration sequences.")] = 0,
    speed: bool = True,
    watch: Watch | None = None,
    on_step: Watch | None = None,
) -> Quantized:
    """Store the matrices of a model in fewer bits; embedding, norms, routers and head stay as they are.

    `model` is a built model, which is changed in place, or a model directory. The format is that of `bits` (4: int4, the
    default; 8: int8), or `format`, a kind (int8, int4, nf4, fp8) or a mapping of its fields; `group` inputs share a scale, by
    default 64, or fewer where 64 does not divide every matrix. With `activations` "int8" a leaf of int8 also rounds each token
    that it reads to 8 bits, and multiplies integers. `method` is rtn, gptq or awq: by default gptq with a `text`, else rtn. Of
    the text, `samples` sequences of `length` tokens calibrate, and the perplexity is measured on its last twentieth. `skip` are
    patterns of leaves to leave as they are. `out` is the model directory to write; `on_step` gets (batches done, in all).
    """
    from dovetail.core.finite import check_weights
    from dovetail.files.model_dir import must_be_free
    from dovetail.hf.write import write_own
    from dovetail.transformer import Transformer
    from dovetail.weights.quantization.method import apply, method_needs_text
    from dovetail.weights.quantization.recipe import recipe_of, select

    method = method or ("rtn" if text is None else "gptq")
    if method_needs_text(method) and text is None:
        raise UsageError(f"--method {method}: needs calibration text; give --text")
    place = None if out is None else Path(out)
    if place is not None:
        must_be_free(place, force)
    source, spec = (None, model.spec) if isinstance(model, Transformer) else _source(model)
    chosen = _format(spec, bits, format, group, skip)
    if activations is not None:
        chosen = _with_activations(chosen)
    recipe = select(spec, chosen, skip=skip)
    if not isinstance(model, Transformer):
        model = load(model, watch=watch)
    if recipe_of(model):
        raise SpecError(next(iter(recipe_of(model))), "is quantized already", "start from the dense model")
    check_weights(model, spec)
    corpus = None if text is None else _corpus(model, text, length)
    before = _measured(model, corpus, length, speed)
    batches = [] if corpus is None else _batches(corpus, samples, length, seed)
    applied = apply(model, recipe, method, batches, on_step)
    after = _measured(model, corpus, length, speed)
    if place is not None:
        save(model, place) if source is None else write_own(model, source, place)
    return Quantized(model, chosen, method, applied, before, after, place)


def _source(model: str | Path) -> tuple[Directory, Model]:
    """The directory of a model and its spec."""
    from dovetail.hf.adapter import is_adapter
    from dovetail.hf.load import origin

    if is_adapter(model):
        remedy = f"merge it first (dovetail merge {model} -o DIR), or quantize its base and load the adapter on that"
        raise FileError(f"{model}: is an adapter directory, without a model of its own; {remedy}")
    return Directory(model), origin(Directory(model)).spec


def _format(
    spec: Model, bits: int | None, format: str | dict[str, Any] | Format | None, group: int | None, skip: Sequence[str]
) -> Format:
    """The format that the arguments name, with a group that divides every matrix."""
    from dovetail.ops.formats.format import Format, format_from
    from dovetail.weights.quantization.recipe import candidates

    if bits is not None and bits not in FORMATS:
        raise UsageError(f"--bits: {bits} is not a supported number of bits; use {' or '.join(map(str, FORMATS))}")
    if bits is not None and format is not None:
        raise UsageError(f"--bits {bits}: the bits are those of --format; give one of the two")
    if isinstance(format, Format):
        if group is not None:
            raise UsageError(f"--group {group}: the group is a field of the format; give it there")
        return format
    bits = 4 if bits is None else bits
    data = {"kind": FORMATS[bits]} if format is None else {"kind": format} if isinstance(format, str) else dict(format)
    made = format_from(data)
    fields = {field.name: field for field in dc.fields(made)}
    if group is not None and "group" not in fields:
        raise UsageError(f"--group {group}: {made.kind} has no groups")
    if group is not None and data.get("group", group) != group:
        raise UsageError(f"--group {group}: the format has groups of {data['group']}; give one of the two")
    if group is not None:
        return dc.replace(made, group=group)
    if "group" in data or "group" not in fields or fields["group"].default is None:
        return made
    inputs = {d.weight.shape(d.scope)[-1] for d in candidates(spec).values()}
    fitting = [size for size in GROUPS if all(inp % size == 0 for inp in inputs)]
    return dc.replace(made, group=fitting[0]) if fitting else made


def _with_activations(format: Format) -> Format:
    """The format with activations in 8 bits, too."""
    if "dynamic" not in {field.name for field in dc.fields(format)}:
        raise UsageError(f"--activations: {format.kind} multiplies activations as they are; use --bits 8")
    return dc.replace(format, dynamic=True)


def _corpus(model: Transformer, text: str | Path, length: int) -> Corpus:
    """The text, tokenized and checked against the model."""
    from dovetail.account import longest_length
    from dovetail.data.corpus import Corpus, read_corpus

    tokenizer = model.tokenizer
    if tokenizer is None:
        raise FileError(f"{text}: the model has no tokenizer to read it; load it from a directory with a tokenizer.json")
    longest = longest_length(model.spec)
    if longest is not None and length > longest:
        raise SpecError("--length", f"{length} tokens; the limit of the model is {longest}")
    ids = tokenizer.encode(read_corpus(Path(text)))
    if len(ids) and int(ids.max()) >= model.spec.vocab:
        problem = f"the text has token {int(ids.max())}; the vocabulary has {model.spec.vocab} tokens"
        raise SpecError("vocab", problem, "use the tokenizer of the model")
    return Corpus.cut(ids, length, name=str(text))


def _batches(corpus: Corpus, samples: int, length: int, seed: int) -> list[torch.Tensor]:
    """Calibration batches (rows, length), `samples` rows in all."""
    counts = [BATCH] * (samples // BATCH) + [samples % BATCH] * bool(samples % BATCH)
    return [corpus.batch(seed, step, rows, length).tokens for step, rows in enumerate(counts)]


def _measured(model: Transformer, corpus: Corpus | None, length: int, speed: bool) -> Measured:
    """The size of a model, its perplexity on the held-out text, and the speed of decoding."""
    import torch

    from dovetail.core.declared_tensors import stored
    from dovetail.core.module import evaluating

    nbytes = sum(tensor.nbytes for _, tensor in stored(model, model.spec))
    perplexity = None
    with torch.no_grad():
        if corpus is not None and model.predicts_next:
            with evaluating(model):
                losses = [float(model.loss(batch.tokens, batch.labels)) for batch in corpus.validation(BATCH, length)]
            perplexity = math.exp(min(sum(losses) / len(losses), 700.0))
        return Measured(nbytes, perplexity, _speed(model) if speed else None)


def _speed(model: Transformer) -> float | None:
    """Tokens per second of decoding, one sequence; None for a model that does not generate."""
    import torch

    from dovetail.decoding.generation import check_generates, generate_tokens

    try:
        check_generates(model.spec)
    except SpecError:
        return None
    if model.spec.encoder is not None:
        return None
    prompt = torch.arange(DECODED) % model.spec.vocab
    best = math.inf
    for _ in range(2):  # the first run warms up
        tokens = generate_tokens(model, prompt, DECODED)
        next(tokens)
        begin, count = time.perf_counter(), sum(1 for _ in tokens)
        best = min(best, (time.perf_counter() - begin) / max(count, 1))
    return 1 / best if best > 0 else None
