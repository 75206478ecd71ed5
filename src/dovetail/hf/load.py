"""Load the model of a directory: ours (`dovetail.yaml`) or in Hugging Face layout (`config.json`).

The spec is read first, as plain data (hf/origin.py); then the headers of the weight files; then the two are compared; only
then is memory allocated. Weight files are memory-mapped: a tensor with the same layout as ours takes no memory of its own until
it is written to. A tensor that a family lays out differently is copied, one at a time. Do not change such a file in place while
the model is in use; replacing it, as `save` does, is safe.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dovetail.base.errors import FileError
from dovetail.base.limits import CONSTANT_VALUES, SPEC_BYTES
from dovetail.disk.model_files import ADAPTER_FILE, INDEX_FILE, PEFT_CONFIG, QUANTIZATION_FILE, RUN_FILE, WEIGHTS_FILE
from dovetail.disk.replace import set_aside
from dovetail.disk.tensors import TensorFile
from dovetail.disk.untrusted import PICKLES, Directory, pickle_refusal
from dovetail.hf.dialect import DIALECTS
from dovetail.hf.hf import form_of
from dovetail.hf.origin import origin, tensor_index
from dovetail.hf.quantized import split_quantization
from dovetail.hf.tensors import Dropped, ImportPlan, warn_dropped
from dovetail.model.construction import on_meta, set_constants, tie
from dovetail.model.model import Model
from dovetail.model.transformer import Transformer
from dovetail.nn.linear import Linear
from dovetail.nn.module import holder
from dovetail.spec.check import check
from dovetail.spec.fold import declared
from dovetail.weights.quantization.leaf import QuantizedStorage
from dovetail.weights.quantization.recipe import Recipe, candidates, open_leaves, quantized_leaves, read_recipe, stored_layout

NUMBERS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # what a weight may be in

Watch = Callable[[int, int], None]  # (bytes read, bytes in all)


class Loaded(NamedTuple):
    """The model of a directory, and the tensors of the directory that it does not hold."""

    model: Transformer
    dropped: list[Dropped]


class Opened(NamedTuple):
    """An open model directory. `tensors` gives (our path, tensor) in the order of the files."""

    spec: Model
    tensors: Iterator[tuple[str, Tensor]]
    dropped: list[Dropped]
    dtype: torch.dtype  # of most bytes; quantized weights are read as bfloat16
    recipe: Recipe  # of the leaves whose tensors are given in fewer bits


def load(directory: str | Path, *, watch: Watch | None = None) -> Transformer:
    """The model of a directory, every weight bit for bit and in the dtype it was saved in; `model.part` is its spec. No code in
    the directory is executed. `watch` is called with the bytes read so far. Tensors that are not imported, such as rotary
    frequencies, are reported by a DroppedTensors warning per name pattern."""
    loaded = load_reporting(directory, watch=watch)
    warn_dropped(loaded.dropped)
    return loaded.model


def load_reporting(directory: str | Path, *, watch: Watch | None = None) -> Loaded:
    """As `load`, with the dropped tensors in the result instead of a warning."""
    with opened(directory, watch, dense=False) as files:
        model = on_meta(files.spec)
        open_leaves(model, files.spec, files.recipe)
        dtype = _put(model, files.spec, files.tensors)
        for _, leaf in quantized_leaves(model):
            leaf.storage.dtype = dtype
    set_constants(model, files.spec, dtype, "cpu")
    tie(model, files.spec)
    return Loaded(model, files.dropped)


@contextlib.contextmanager
def opened(directory: str | Path, watch: Watch | None = None, *, dense: bool = True) -> Iterator[Opened]:
    """Open a model directory: its spec is read, its headers are compared with the spec, and each tensor is read when its turn
    comes. With `dense` every weight is given dense, whatever form the files hold it in."""
    where = _directory(directory)
    spec, config = origin(where)
    check(spec)  # before sizes are computed from it
    recipe = _recipe(where, spec)
    with contextlib.ExitStack() as stack:
        files = open_weights(where, stack)
        _check_size(where, spec, files)
        reading = _Reading(files, watch or (lambda done, total: None))
        with _naming(where):
            tensors, dropped = (_own(spec, reading, recipe), []) if config is None else _theirs(spec, config, reading)
            packed = stored_layout(spec, recipe)
            dtype = _main_dtype({name: file for name, file in files.items() if name not in packed})
            if dense and recipe:
                tensors, recipe, packed = _dense(tensors, spec, recipe, dtype), {}, {}
            yield Opened(spec, _floating(tensors, packed), dropped, dtype, recipe)


def _directory(directory: str | Path) -> Directory:
    path = Path(directory)
    if aside := set_aside(path):
        raise FileError(f"{path.absolute()}: no such directory; a replacement was interrupted; rename {aside} to restore it")
    return Directory(path)


# -- files ----------------------------------------------------------------------------------------------------------


def _without_weights(where: Directory) -> str:
    """What a directory without weights is, and what to do with it."""
    if where.has(ADAPTER_FILE) or where.has(PEFT_CONFIG):
        return f"is an adapter, not a model; merge it first: dovetail merge {where.place.name} -o MERGED"
    if where.has(RUN_FILE):
        export = f"dovetail export {where.place.name} --step N -o OUT"
        return f"is an unfinished run; resume it with the command that started it, or use its newest checkpoint: {export}"
    return f"holds no {WEIGHTS_FILE}"


def open_weights(where: Directory, stack: contextlib.ExitStack) -> dict[str, TensorFile]:
    """The file of every tensor, in the order of the files."""
    if not where.has(WEIGHTS_FILE) and not where.has(INDEX_FILE):
        for name in where.names():
            if name.endswith(PICKLES):
                raise FileError(pickle_refusal(where.place / name))
        raise FileError(f"{where.place}: {_without_weights(where)}")
    index = {} if where.has(WEIGHTS_FILE) else tensor_index(where)
    result: dict[str, TensorFile] = {}
    for name in dict.fromkeys(index.values()) or (WEIGHTS_FILE,):
        file = stack.enter_context(TensorFile(where.path(name), where.place / name))
        for tensor in sorted(file.entries, key=lambda tensor: file.entries[tensor].start):
            if tensor in result:
                raise FileError(f"{file.shown}: {tensor} is in {result[tensor].shown.name} as well")
            result[tensor] = file
    for tensor, name in index.items():
        if tensor not in result or result[tensor].shown.name != name:
            raise FileError(f"{where.place / INDEX_FILE}: {tensor} is not in {name}")
    return result


def _check_size(where: Directory, spec: Model, files: Mapping[str, TensorFile]) -> None:
    """Refuse a spec with more than two numbers per byte of the files, before memory is allocated for it."""
    held = sum(file.entries[tensor].size for tensor, file in files.items())
    asked, constant = 0, 0
    for d in declared(spec):
        asked += d.size if d.weight.stored else 0
        constant += d.size if d.weight.role == "const" else 0
    if asked > 2 * held or constant > max(CONSTANT_VALUES, 4 * held):
        what = f"the spec asks for {asked:,} weights and {constant:,} constants; the files hold {held:,} bytes"
        raise FileError(f"{where.place}: {what}")


class _Reading:
    """Reads tensors by name from several files, and reports the bytes read."""

    def __init__(self, files: Mapping[str, TensorFile], watch: Watch) -> None:
        self.files, self.watch = files, watch
        self.done, self.total = 0, sum(file.entries[tensor].size for tensor, file in files.items())

    def __call__(self, name: str) -> Tensor:
        tensor = self.files[name].read(name)
        self.done += tensor.nbytes
        self.watch(self.done, self.total)
        return tensor


# -- tensors --------------------------------------------------------------------------------------------------------


def _theirs(spec: Model, config: Mapping[str, Any], reading: _Reading) -> tuple[Iterator[tuple[str, Tensor]], list[Dropped]]:
    """The tensors of a directory in Hugging Face layout under our paths, and those that are not imported."""
    dialect, (plain, form) = DIALECTS[config["model_type"]], split_quantization(config)
    names, read = (reading.files, reading) if form is None else form.tensors(reading.files, reading)
    plan = ImportPlan(spec, dialect, form_of(plain, dialect), names)
    return plan.read(read), plan.dropped({name: file.entries[name].size for name, file in reading.files.items()})


def _recipe(where: Directory, spec: Model) -> Recipe:
    """How the files of a directory of ours hold the weights that are in fewer bits."""
    if not where.has(QUANTIZATION_FILE):
        return {}
    return read_recipe(where.text(QUANTIZATION_FILE, SPEC_BYTES), spec, str(where.place / QUANTIZATION_FILE))


def _dense(
    tensors: Iterator[tuple[str, Tensor]], spec: Model, recipe: Recipe, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """The tensors, with the dense W of each quantized leaf in place of those that stand for it."""
    sizes = {path: d.weight.shape(d.scope)[-1] for path, d in candidates(spec).items()}
    waiting: dict[str, dict[str, Tensor]] = {path: {} for path in recipe}
    for name, tensor in tensors:
        path, _, own = name.rpartition(".")
        if path not in recipe or own == "bias":
            yield name, tensor
            continue
        waiting[path][own] = tensor
        if len(waiting[path]) == len(recipe[path].tensors((1, sizes[path]))):
            yield f"{path}.weight", recipe[path].decode(waiting.pop(path), sizes[path]).to(dtype)


def _own(spec: Model, reading: _Reading, recipe: Recipe) -> Iterator[tuple[str, Tensor]]:
    shapes = {d.path: d.weight.shape(d.scope) for d in declared(spec) if d.weight.stored}
    shapes = {path: shape for path, shape in shapes.items() if path.removesuffix(".weight") not in recipe}
    shapes |= {name: tuple(tensor.shape) for name, tensor in stored_layout(spec, recipe).items()}
    if unknown := sorted(set(reading.files) - set(shapes)):
        raise FileError(f"{unknown[0]} is not a weight of this spec{_more(unknown)}; was the spec edited?")
    if missing := sorted(set(shapes) - set(reading.files)):
        raise FileError(f"{missing[0]} is missing{_more(missing)}; was the spec edited?")
    for path, file in reading.files.items():
        given = file.entries[path].shape
        if given != shapes[path]:
            raise FileError(f"{path} is {list(given)}; the spec says {list(shapes[path])}")
    for path in reading.files:
        yield path, reading(path)


def _floating(tensors: Iterator[tuple[str, Tensor]], packed: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors, each of which must hold floating-point numbers, or have the dtype that its format declares."""
    for path, tensor in tensors:
        if path in packed:
            if tensor.dtype != packed[path].dtype:
                raise FileError(f"{path} holds {tensor.dtype}; its format has {packed[path].dtype}")
        elif tensor.dtype not in NUMBERS:
            raise FileError(f"{path} holds {tensor.dtype}, not floating-point numbers of 16 bits or more")
        yield path, tensor


def _main_dtype(files: Mapping[str, TensorFile]) -> torch.dtype:
    """The dtype that most bytes of the files are read in."""
    sizes: Counter[torch.dtype] = Counter()
    for tensor, file in files.items():
        entry = file.entries[tensor]
        sizes[entry.dtype if entry.dtype in NUMBERS else torch.bfloat16] += entry.size
    return sizes.most_common(1)[0][0] if sizes else torch.float32


def _put(model: nn.Module, spec: Model, tensors: Iterator[tuple[str, Tensor]]) -> torch.dtype:
    """Assign the tensors to the model as they are read; return the dtype that all of them promote to."""
    buffers = {d.path for d in declared(spec) if d.weight.buffer}
    found: set[torch.dtype] = set()
    for path, tensor in tensors:
        module, leaf = holder(model, path)
        if isinstance(module, Linear) and isinstance(module.storage, QuantizedStorage) and leaf != "bias":
            module.storage.put(module, leaf, tensor)
        elif path in buffers:
            module.register_buffer(leaf, tensor)
        else:
            module.register_parameter(leaf, nn.Parameter(tensor))
            found.add(tensor.dtype)
    return functools.reduce(torch.promote_types, found)


@contextlib.contextmanager
def _naming(where: Directory) -> Iterator[None]:
    """Add the directory to errors about its tensors."""
    try:
        yield
    except FileError as error:
        text = str(error)
        raise FileError(text if text.startswith(str(where.place)) else f"{where.place}: {text}") from error


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
