"""Writers: one function per kind, which writes a part as plain PyTorch.

    @writes("rmsnorm")
    def rms(context: Context) -> Call:
        …
        return Call.to(context.file.define("RMSNorm", text), dim=context.size("dim"))

The result of a writer depends on the group of the part:

    norm, ffn, bank     Call: constructs the module, which takes x
    router              Call: constructs the module, which returns the experts of each token and their weights
    mixer               MixerCode: the call, and the inputs of the module beside x
    position            PositionCode: what is added to the residual stream, done to q and k, or added to the scores
    scaling             ScalingCode: how the rotary frequencies change
    feature             FeatureCode: the feature maps of queries and keys
    mask                MaskCode: a name, and an expression of the positions q (N, 1) and k (1, N)
    act                 Act: a function from an expression to an expression
    embed, head         EmbedCode, HeadCode: the call, and how the model uses it
    wire                Join: from the calls of the branches to the lines of a block's forward
    block               BlockCode: the inputs of its branches, and its definition once all blocks of the stack are known
    model               ModelCode: its call, inputs and example inputs
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from dovetail.base.errors import SpecError
from dovetail.codegen.code import Call, File
from dovetail.codegen.observe import ignore
from dovetail.spec.part import KINDS, Part, join
from dovetail.spec.scope import Scope


@dc.dataclass(frozen=True)
class Context:
    """A part in its scope, and the file it is written to."""

    part: Any
    scope: Scope  # of the part itself, with its own axes
    file: File

    def size(self, *axes: str) -> int:
        """Return the product of the axes' sizes."""
        return self.scope.size(*axes)

    def write(self, name: str, part: Part | None = None) -> Any:
        """Write a child or a field of this part and return the result."""
        return self.below(name, part).written()

    def below(self, name: str, part: Part | None = None) -> Context:
        """Return the context of a child or a field of this part."""
        child = getattr(self.part, name) if part is None else part
        path = join(self.scope.path, name)
        if child.module is None:
            return Context(child, self.scope.at_path(path), self.file)
        return Context(child, child.axes(self.part.child_scope(self.scope, name).at_path(path)), self.file)

    def written(self) -> Any:
        """Write this part by the writer of its kind and return the result."""
        if self.part.kind not in WRITERS:
            self.refuse("", f"{self.part.kind} has no writer yet")
        ignore(self.part, IGNORED[self.part.kind])
        return WRITERS[self.part.kind](self)

    def refuse(self, field: str, problem: str) -> NoReturn:
        """Raise SpecError: this part cannot be written."""
        raise SpecError(join(self.scope.path, field) if field else self.scope.path, problem, known(self.part))


Writer = Callable[[Context], Any]
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
    """Return a list of the kinds of its group that have a writer."""
    kinds = sorted(kind for kind in WRITERS if kind in KINDS and KINDS[kind].group == part.group)
    return f"with one: {', '.join(kinds)}" if kinds else f"no kind of {part.group} has one: leave it out of the spec"


# -- results of writers ------------------------------------------------------------------------------------------------


@dc.dataclass(frozen=True)
class MixerCode:
    """A mixer: the call, and the inputs of its forward beside x, each with the expression by which the model computes it."""

    call: Call
    given: Mapping[str, str] = dc.field(default_factory=dict)


@dc.dataclass(frozen=True)
class PositionCode:
    """A position: every field is neutral by default."""

    module: Call | None = None  # stored as `position`
    stream: str = ""  # an expression that replaces x
    turn: Callable[[str], str] | None = None  # from q or k to its rotated expression
    bias: str = ""  # an expression added to the scores (1, H, N, N)
    given: Mapping[str, str] = dc.field(default_factory=dict)  # inputs of the bias, computed by the model


@dc.dataclass(frozen=True)
class FeatureCode:
    """A feature map: the expressions of a query and of a key, and the module they use, stored as `feature`."""

    query: Callable[[str], str]
    key: Callable[[str], str]
    module: Call | None = None


@dc.dataclass(frozen=True)
class ScalingCode:
    """A scaling: lines that change `frequency`, and the factor of cos and sin."""

    lines: str = ""
    amplitude: float = 1.0


@dc.dataclass(frozen=True)
class MaskCode:
    """A mask: a name, and an expression of the visible keys (N, N), or (H, N, N) where heads differ."""

    name: str
    expression: str
    by_head: bool = False
    by_key: bool = False  # the same for every query: (1, N)
    terms: tuple[str, ...] = ()  # where it is several expressions joined …
    sign: str = ""  # … by this


Act = Callable[[str], str]


@dc.dataclass(frozen=True)
class WireCode:
    """How branches join the residual stream: a docstring, the lines of a forward, and the variable they return."""

    doc: str
    lines: list[str]
    out: str = "x"
    scale: Call | None = None  # stored as `wire`: a learned factor per channel


# per step: branch -> its call, with a placeholder for what it reads
Join = Callable[[Sequence[Mapping[str, str]]], WireCode]


@dc.dataclass(frozen=True)
class BlockCode:
    """A block: the inputs of its branches beside x, and its call once the inputs of all blocks of its stack are known."""

    given: Mapping[str, str]
    define: Callable[[Sequence[str]], Call]


@dc.dataclass(frozen=True)
class ModelCode:
    """A model: its call, the inputs of its forward, and expressions of example inputs."""

    call: Call
    inputs: tuple[str, ...]
    examples: tuple[str, ...]
    shape: str  # of the output


@dc.dataclass(frozen=True)
class EmbedCode:
    """An embedding: the call, and how a model uses it."""

    module: Call | None
    inputs: tuple[str, ...]  # arguments of the model's forward, with their types
    apply: str  # expression of the embeddings
    example: str  # expression of an example input


@dc.dataclass(frozen=True)
class HeadCode:
    """A head: the call, and the lines that turn `x` into the output."""

    module: Call | None
    lines: str
    shape: str
