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
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from dovetail.api.models import load, save
from dovetail.api.options import OUR_MODEL, REPLACE_MODEL, InFile, Length, OutDir, Seed
from dovetail.api.result import Result
from dovetail.base.errors import FileError, SpecError, UsageError
from dovetail.base.option import BatchSize, Option
from dovetail.base.units import size
from dovetail.disk.untrusted import Directory
from dovetail.views.blocks import TextTable, View

if TYPE_CHECKING:
    from dovetail.hf.load import Watch
    from dovetail.model.model import Model
    from dovetail.model.transformer import Transformer
    from dovetail.ops.formats.format import Format
    from dovetail.weights.quantization.measure import Measured
    from dovetail.weights.quantization.method import MethodResult


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
    from dovetail.files.model_dir import must_be_free
    from dovetail.hf.write import write_own
    from dovetail.model.transformer import Transformer
    from dovetail.nn.finite import check_weights
    from dovetail.training.source import corpus_for
    from dovetail.weights.quantization.measure import calibration_batches, measured
    from dovetail.weights.quantization.method import apply, method_needs_text
    from dovetail.weights.quantization.recipe import named_format, recipe_of, select, with_activations

    method = method or ("rtn" if text is None else "gptq")
    if method_needs_text(method) and text is None:
        raise UsageError(f"--method {method}: needs calibration text; give --text")
    place = None if out is None else Path(out)
    if place is not None:
        must_be_free(place, force)
    source, spec = (None, model.spec) if isinstance(model, Transformer) else _source(model)
    chosen = named_format(spec, bits, format, group)
    if activations is not None:
        chosen = with_activations(chosen)
    recipe = select(spec, chosen, skip=skip)
    if not isinstance(model, Transformer):
        model = load(model, watch=watch)
    if recipe_of(model):
        raise SpecError(next(iter(recipe_of(model))), "is quantized already", "start from the dense model")
    check_weights(model, spec)
    corpus = None if text is None else corpus_for([model.spec], text, model.tokenizer, length, "use the tokenizer of the model")
    before = measured(model, corpus, length, speed)
    batches = [] if corpus is None else calibration_batches(corpus, samples, length, seed)
    applied = apply(model, recipe, method, batches, on_step)
    after = measured(model, corpus, length, speed)
    if place is not None:
        save(model, place) if source is None else write_own(model, source, place)
    return Quantized(model, chosen, method, applied, before, after, place)


def _source(model: str | Path) -> tuple[Directory, Model]:
    """The directory of a model and its spec."""
    from dovetail.hf.adapter import is_adapter
    from dovetail.hf.origin import origin

    if is_adapter(model):
        remedy = f"merge it first (dovetail merge {model} -o DIR), or quantize its base and load the adapter on that"
        raise FileError(f"{model}: is an adapter directory, without a model of its own; {remedy}")
    return Directory(model), origin(Directory(model)).spec
