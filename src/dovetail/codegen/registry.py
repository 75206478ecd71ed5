"""Writers: one function a kind, that gives the part as plain PyTorch.

    @writes("rmsnorm")
    def rms(here: Here) -> Call:
        …
        return Call.to(here.file.define("RMSNorm", text), dim=here.size("dim"))

What a writer gives depends on the group, since parts stand in different places of the text:

    norm, ffn, bank     Call: what makes the module; the module takes x
    router              Call: its module takes x and gives the experts chosen and how much each counts
    mixer               Mixed: the call, and what the module takes beside x
    position            Placed: what happens on the stream, to q and k, or to the scores
    scaling             Stretch: how frequencies change
    feature             Features: what becomes of a query and of a key
    mask                Seen: a name, and an expression of the positions q (N, 1) and k (1, N)
    act                 Act: an expression of an expression
    embed, head         Entry, Answer: the call, and how the model uses it
    wire                Join: from the calls of the branches to the lines of a block's forward
    block               Branched: what its branches take beside x, and how it is defined once the stack's other blocks are known
    model               Whole: its call, and how it is tried
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from dovetail.codegen.code import Call, File
from dovetail.codegen.observe import ignore
from dovetail.core.errors import SpecError
from dovetail.core.part import KINDS, Part, join
from dovetail.core.scope import Scope


@dc.dataclass(frozen=True)
class Here:
    """A part where it stands, with the file it is written to."""

    part: Any
    scope: Scope  # what the part itself sees, its own axes among it
    file: File

    def size(self, *axes: str) -> int:
        """The product of the axes' sizes."""
        return self.scope.size(*axes)

    def write(self, name: str, part: Part | None = None) -> Any:
        """A child or a field of this part, written."""
        return self.below(name, part).written()

    def below(self, name: str, part: Part | None = None) -> Here:
        """The same place for a child or a field of this part."""
        child = getattr(self.part, name) if part is None else part
        path = join(self.scope.path, name)
        if child.module() is None:
            return Here(child, self.scope.at_path(path), self.file)
        return Here(child, child.axes(self.part.child_scope(self.scope, name).at_path(path)), self.file)

    def written(self) -> Any:
        """What the writer of this kind gives."""
        if self.part.kind not in WRITERS:
            self.refuse("", f"{self.part.kind} has no writer yet")
        ignore(self.part, IGNORED[self.part.kind])
        return WRITERS[self.part.kind](self)

    def refuse(self, field: str, problem: str) -> NoReturn:
        """An error: this cannot be written."""
        raise SpecError(join(self.scope.path, field) if field else self.scope.path, problem, known(self.part))


Writer = Callable[[Here], Any]
WRITERS: dict[str, Writer] = {}
IGNORED: dict[str, tuple[str, ...]] = {}


def writes(*kinds: str, ignores: tuple[str, ...] = ()) -> Callable[[Writer], Writer]:
    """Register the writer of these kinds. It must read every field of its part, but for those in `ignores`: fields that change
    nothing an emitted file computes (how weights are initialized, when cached keys are rotated)."""

    def decorate(function: Writer) -> Writer:
        for kind in kinds:
            WRITERS[kind], IGNORED[kind] = function, ignores
        return function

    return decorate


def known(part: Part) -> str:
    """The kinds of its group that can be written."""
    return f"with one: {', '.join(sorted(kind for kind in WRITERS if kind in KINDS and KINDS[kind].group == part.group))}"


# -- what writers give ------------------------------------------------------------------------------------------------


@dc.dataclass(frozen=True)
class Mixed:
    """A mixer: the call, and what its forward takes beside x, each with the expression by which a model makes it."""

    call: Call
    given: Mapping[str, str] = dc.field(default_factory=dict)


@dc.dataclass(frozen=True)
class Placed:
    """A position: all neutral by default."""

    module: Call | None = None  # held as `position`
    stream: str = ""  # what becomes of x
    turn: Callable[[str], str] | None = None  # what becomes of q and of k
    bias: str = ""  # what is added to the scores (1, H, N, N)
    given: Mapping[str, str] = dc.field(default_factory=dict)  # what the bias needs from the model


@dc.dataclass(frozen=True)
class Features:
    """A feature map: what becomes of a query and of a key, and the module that knows, held as `feature`."""

    query: Callable[[str], str]
    key: Callable[[str], str]
    module: Call | None = None


@dc.dataclass(frozen=True)
class Stretch:
    """A scaling: lines that change `frequency`, and what cos and sin are multiplied by."""

    lines: str = ""
    amplitude: float = 1.0


@dc.dataclass(frozen=True)
class Seen:
    """A mask: a name, and which keys are seen (N, N), or (H, N, N) where heads see different ones."""

    name: str
    expression: str
    by_head: bool = False
    by_key: bool = False  # the same for every query: (1, N)
    terms: tuple[str, ...] = ()  # where it is several expressions joined …
    sign: str = ""  # … by this


Act = Callable[[str], str]


@dc.dataclass(frozen=True)
class Wiring:
    """How branches join the stream: a sentence, the lines of a forward, and the name of what they leave."""

    doc: str
    lines: list[str]
    out: str = "x"
    scale: Call | None = None  # held as `wire`: a learned number a channel


Join = Callable[[Mapping[str, str]], Wiring]  # branch -> its call, with a hole for what it reads


@dc.dataclass(frozen=True)
class Branched:
    """A block: what its branches take beside x, as for a mixer, and its call when the blocks of its stack take these names."""

    given: Mapping[str, str]
    define: Callable[[Sequence[str]], Call]


@dc.dataclass(frozen=True)
class Whole:
    """A model: its call, what its forward takes, and expressions of inputs to try it on."""

    call: Call
    inputs: tuple[str, ...]
    examples: tuple[str, ...]
    shape: str  # of what comes out


@dc.dataclass(frozen=True)
class Entry:
    """An embedding: the call, and how a model uses it."""

    module: Call | None
    inputs: tuple[str, ...]  # arguments of the model's forward, with their types
    apply: str  # expression of the stream
    example: str  # expression of a few inputs to try it on


@dc.dataclass(frozen=True)
class Answer:
    """A head: the call, and the lines that make `x` the answer."""

    module: Call | None
    lines: str
    shape: str
