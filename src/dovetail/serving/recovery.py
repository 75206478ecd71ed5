"""Recovery of an engine: from a call that ended in the middle, and from changed weights.

    with engine.call:            a call that changes the engine; where the last one ended in the middle, `recover` runs first

The truth is the engine's requests, with the tokens of each that steps have returned. Rows, pages, queues, cached prefixes and
the rows of drafters follow from them: they are dropped, and the tokens are computed again. A step has happened once its outputs
are in `engine.outputs`; where it is interrupted after that, the next step returns them.

Weights: notices that the weights of a served model have changed, since KV caches and prefixes belong to the old ones.

    weights = Weights(model)
    weights.written()      some weight was written to in place (an optimizer's step, load_state_dict): asked in every step
    weights.changed()      or a weight or module was replaced: asked when a request is added

Writes through `.data` and to inference tensors leave no trace in torch; `Engine.reset` is for these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.base.errors import StateError

if TYPE_CHECKING:
    from dovetail.serving.engine import Engine


from typing import Any

from torch import Tensor, nn


class Change:
    """A call that changes an engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.open = False  # it has begun; an interrupted one leaves it so

    def __enter__(self) -> None:
        if self.open:
            recover(self.engine)
        self.engine.outputs = []
        self.open = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.open = kind is not None


def recover(engine: Engine) -> None:
    """Undo what an interrupted call has changed. An interrupt in here is recovered from, too: all of it may run again."""
    leave(engine)
    engine.late, engine.outputs = [*engine.late, *(output for _, output in engine.outputs)], []
    restart(engine)


def leave(engine: Engine) -> None:
    """Count the tokens of the last step as returned, and forget the continuations that ended in it."""
    for one, output in engine.outputs:
        one.returned = len(one.tokens)
        others = engine.requests.get(one.request.id, [])
        if output.finish is not None and one in others:
            others.remove(one)
        if not others:
            engine.forget(one.request.id)


def restart(engine: Engine) -> None:
    """Drop rows, pages and cached prefixes, and let all requests wait: their tokens are computed again."""
    if engine.runner.compiled is not None and engine.weights.changed():
        raise StateError("model: its weights have changed, and the compiled graph holds the old ones; make a new engine")
    waiting = [one for ones in engine.requests.values() for one in ones]
    for one in waiting:
        one.restart()
        if one.matcher is not None and (matcher := engine.matcher(one.request)) is not None:
            for token in one.generated:
                matcher.push(token)
            one.matcher = matcher
    engine.scored.clear()
    engine.schedule.restart(waiting)
    engine.runner.reset()
    if engine.drafter is not None:
        engine.drafter.reset()
    engine.weights.read()


class Weights:
    """The weights of a model as they were when `read` was called last."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.read()

    def read(self) -> None:
        """Remember the present weights."""
        modules = list(self.model.modules())
        held: list[dict[str, Any]] = [slots for one in modules for slots in (one._modules, one._parameters)]
        self.slots = [(slots, len(slots), [(name, value) for name, value in slots.items()]) for slots in held if slots]
        self.tensors: list[Tensor] = [weight for weight in self.model.parameters() if not weight.is_inference()]
        self.versions = [weight._version for weight in self.tensors]

    def written(self) -> bool:
        """Whether a weight was written to since; 30 ns per weight."""
        return [weight._version for weight in self.tensors] != self.versions

    def changed(self) -> bool:
        """Whether a weight was written to or replaced since."""
        return self.written() or any(
            len(slots) != count or any(slots.get(name) is not value for name, value in values)
            for slots, count, values in self.slots
        )
