"""Initial weights and tokenizer of a run, from a model directory or from the newest checkpoint of a run.

    DIR/model.safetensors                     ours, or in Hugging Face layout
    DIR/checkpoints/step-00000120/            where DIR is a run: its newest checkpoint that verifies, which may be newer

With a moving average in the checkpoint, its weights are taken, as they are saved at the end of a run.
"""

from __future__ import annotations

import contextlib
import dataclasses as dc
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from dovetail.base.errors import FileError
from dovetail.decoding.generation import Vocabulary
from dovetail.disk.model_files import QUANTIZATION_FILE, RUN_FILE, TOKENIZER_FILE
from dovetail.disk.shape import data_sha256, file_sha256
from dovetail.disk.untrusted import Directory
from dovetail.hf.files import class_names, read_vocabulary
from dovetail.hf.load import opened
from dovetail.hf.origin import origin
from dovetail.hf.write import files_beside
from dovetail.model.model import Model
from dovetail.spec.fold import declared
from dovetail.text.tokenizer import Tokenizer
from dovetail.training.checkpoint import CHECKPOINTS, Checkpoints, read_manifest
from dovetail.training.export import check_checkpoint, checkpoint_pieces


@dc.dataclass(frozen=True)
class Start:
    """Where a run starts from."""

    place: Path
    spec: Model
    checkpoint: Path | None  # of a run; None: the weights of the directory
    tokenizer: Tokenizer | None

    @staticmethod
    def open(directory: str | Path) -> Start:
        """Read the spec and the tokenizer of a directory; its weights are read later."""
        where = Directory(Path(directory))
        newest = Checkpoints(where.place / CHECKPOINTS).latest() if where.has(RUN_FILE) and where.has(CHECKPOINTS) else None
        tokenizer = Tokenizer.load(where.place) if where.has(TOKENIZER_FILE) else None
        spec = origin(where).spec
        if newest is not None:
            check_checkpoint(newest, spec)
        return Start(where.place, spec, newest, tokenizer)

    @property
    def quantized(self) -> bool:
        """Whether its weights are stored in fewer bits."""
        return self.checkpoint is None and Directory(self.place).has(QUANTIZATION_FILE)

    def recorded(self) -> dict[str, Any]:
        """The name of the directory, and the SHA-256 of its weights."""
        if self.checkpoint is not None:
            files = {name: one["sha256"] for name, one in read_manifest(self.checkpoint).files.items()}
        else:
            names = [name for name in Directory(self.place).names() if name.endswith(".safetensors")]
            files = {name: file_sha256(self.place / name) for name in names}
        return {"name": str(self.place), "sha256": data_sha256(files)}

    def vocabulary(self) -> Vocabulary:
        """The tokenizer, end tokens and chat template of the directory, as far as it has them."""
        return read_vocabulary(Directory(self.place))

    def files(self) -> dict[str, bytes]:
        """The files to write beside the weights: tokenizer, chat template, generation settings."""
        return files_beside(Directory(self.place))

    def check_fits(self, spec: Model, fresh: str | None = None) -> None:
        """Raise FileError for the first weight of the spec that the directory does not have, or has in another shape; those of
        the part `fresh` are initialized anew."""
        theirs, ours = (
            {d.path: tuple(d.weight.shape(d.scope)) for d in declared(one) if d.weight.stored and not _within(d.path, fresh)}
            for one in (self.spec, spec)
        )
        for path in [*ours, *theirs]:
            a, b = theirs.get(path), ours.get(path)
            if a != b:
                problem = f"has no {path}" if a is None else f"has {path}, and the spec has not" if b is None else None
                problem = problem or f"has {path} of shape {list(a or ())}; the spec says {list(b or ())}"
                remedy = f"`dovetail graft {self.place}` carries weights over to another spec"
                raise FileError(f"{self.place}: {problem}; {remedy}")

    def replaces(self, part: str | None, spec: Model) -> bool:
        """Whether a part of the spec has other weights than that of the directory, by their names and shapes."""
        ours, theirs = (
            {(d.path, tuple(d.weight.shape(d.scope))) for d in declared(one) if d.weight.stored and _within(d.path, part)}
            for one in (spec, self.spec)
        )
        return ours != theirs

    def class_names(self) -> tuple[str, ...]:
        """The names of the classes of the head, as far as the directory has them."""
        return class_names(Directory(self.place))

    def for_text(self) -> Tokenizer:
        """The tokenizer that a text file is encoded by."""
        if self.tokenizer is None:
            raise FileError(f"{self.place}: holds no {TOKENIZER_FILE} to encode the text by; give token shards (--data)")
        return self.tokenizer

    def check_tokenizer(self, tokenizer: Tokenizer | None, data: str, special: Sequence[str] = ()) -> None:
        """Raise FileError where the data has another tokenizer than the weights, with the special tokens of the objective."""
        if self.tokenizer is None or tokenizer is None:
            return
        if self.tokenizer.with_special(special).to_json() != tokenizer.to_json():
            remedy = f"build the data with --tokenizer {self.place}"
            raise FileError(f"{data}: its tokenizer is not that of {self.place}; {remedy}")

    @contextlib.contextmanager
    def weights(self, fresh: str | None = None) -> Generator[Iterable[tuple[str, Tensor]]]:
        """(path, tensor) of every weight but those of the part `fresh`, each read when its turn comes."""
        if self.checkpoint is not None:
            pieces = checkpoint_pieces(self.checkpoint, self.spec)
            yield (pair for piece in pieces for pair in piece.make().items() if not _within(pair[0], fresh))
            return
        with opened(self.place) as files:
            yield (pair for pair in files.tensors if not _within(pair[0], fresh))


def _within(path: str, part: str | None) -> bool:
    return part is not None and path.startswith(f"{part}.")
