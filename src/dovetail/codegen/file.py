"""A spec as one plain PyTorch file: torch and the standard library, and nothing of ours.

    emit(spec, "llama-tiny")  ->  docstring, imports, parts from the smallest to the model, a reader of weights, a trial run

Modules and parameters are called as in the spec, so weights that were saved here load there. For whole texts without padding
the numbers are bit for bit those of an eager run context, wherever that takes the same kernel: always for plain causal or full
attention; up to some hundred tokens for windows and biases and some sixty for soft-caps and sinks, where the tiled kernel is
not yet cheaper; from two tokens on for recurrences in chunks. Elsewhere they agree up to rounding.
"""

from __future__ import annotations

import re
import textwrap

from dovetail.base.errors import SpecError
from dovetail.codegen import writer as _registered  # noqa: F401  every writer must be known before a spec is written
from dovetail.codegen.code import WIDTH, File, fill, in_docstring
from dovetail.codegen.observe import observed, unread
from dovetail.codegen.registry import WRITERS, Context, ModelCode, known
from dovetail.model.model import Model
from dovetail.nn.groups import Init
from dovetail.spec.check import check
from dovetail.spec.part import walk_spec
from dovetail.spec.scope import Scope

HEADER = '''
"""$title in plain PyTorch, from top to bottom.

Written by `dovetail emit`; it needs torch and nothing else.
$letters
All sequences of a batch have one length: there is no padding mask and no KV cache.
$notes  #? notes

    python $script                      random weights
    python $script model.safetensors    saved weights
"""

$imports


'''

LOADER = '''
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def read(path: Path) -> dict[str, Tensor]:
    """Read a .safetensors file: 8 bytes with the header's size, the header, the data."""
    tensors = {}
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        begin = file.tell()
        for name, entry in header.items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                file.seek(begin + first)
                numbers, dtype = bytearray(file.read(last - first)), DTYPES[entry["dtype"]]
                flat = torch.frombuffer(numbers, dtype=dtype)
                tensors[name] = flat.view(entry["shape"]).clone()  # into memory that torch aligns
    return tensors


def load(path: str) -> Model:
    """Load the weights of a .safetensors file, or of a directory of them."""
    place = Path(path)
    files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
    weights = {name: tensor for file in files for name, tensor in read(file).items()}
    with torch.device("meta"):
        model = Model()  # no memory for initial weights
    model.load_state_dict(weights, assign=True)
    return model.eval()
'''

GENERATE = '''
@torch.no_grad()
def generate($given, steps: int) -> Tensor:
    """Greedy decoding: the most likely next token, from all tokens so far."""
    for _ in range(steps):
        following = model($inputs)[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, following], -1)
    return tokens
'''

MAIN = """
if __name__ == "__main__":
    torch.manual_seed(0)
    model = load(sys.argv[1]) if len(sys.argv) > 1 else Model().eval()
    $first = $first_example
    tokens = $second_example  #? two
    with torch.no_grad():
        print("$what", tuple(model($inputs).shape))
    print("tokens", generate(model, $inputs, 16).tolist())  #? generate
"""


def emit(spec: Model, name: str = "model") -> str:
    """The source of a file that computes the spec; `name` is the title of the model in it."""
    check(spec)
    for path, part in walk_spec(spec):
        if part.kind not in WRITERS and not isinstance(part, Init):
            raise SpecError(path, f"{part.kind} has no writer yet", known(part))
    file, read = File(), observed(spec)
    whole: ModelCode = Context(read, read.axes(Scope()), file).written()
    for path, kind in unread(read):
        problem = f"the writer of {kind} does not read this field, so the file would compute something else"
        raise SpecError(path, problem, "extend the writer of this kind in dovetail.codegen.writer")
    decodes = spec.order() == "causal" and spec.head is not None and not spec.head.pools()
    body = "\n\n\n".join([*file.definitions.values(), *_ending(spec, whole, decodes)])
    return _header(file, body, name) + body + "\n"


def _ending(spec: Model, whole: ModelCode, decodes: bool) -> list[str]:
    """The reader of weights, generation where the model decodes, and a trial run."""
    names = [given.partition(":")[0] for given in whole.inputs if "=" not in given]
    found = [fill(LOADER)]
    # classes have no next token, though a decoder may sort tokens into them
    generates = decodes and "V" in whole.shape
    if generates:
        given = ", ".join(["model: Model", *(f"{name}: Tensor" for name in names)])
        found.append(fill(GENERATE, given=given, inputs=", ".join(names)))
    examples = [*whole.examples, ""]
    trial = {"first": names[0], "first_example": examples[0], "second_example": examples[1]}
    what = "logits" if generates else "output"
    return [*found, fill(MAIN, {"two": len(names) > 1, "generate": generates}, **trial, what=what, inputs=", ".join(names))]


def _header(file: File, body: str, name: str) -> str:
    """The docstring and the imports that the body needs."""
    standard = {"import json": "json.", "import math": "math.", "import sys": "sys."}
    imports = [line for line, use in standard.items() if use in body]
    if "Callable" in body:
        imports.append("from collections.abc import Callable")
    imports.append("from pathlib import Path")
    imports += ["", "import torch", "import torch.nn.functional as F", "from torch import Tensor, nn"]
    letters = "; ".join(f"{letter} {meaning}" for letter, meaning in file.letters.items())
    notes = [textwrap.fill(text, WIDTH) for text in (f"Shapes: {letters}.", *file.notes)]
    script = f"{re.sub(r'[^A-Za-z0-9]+', '_', name).strip('_') or 'model'}.py"  # a line to paste: plain letters alone
    placeholders = {"title": in_docstring(name), "letters": notes[0], "script": script, "imports": "\n".join(imports)}
    return fill(HEADER, {"notes": file.notes}, **placeholders, notes="\n".join(notes[1:])) + "\n\n\n"
