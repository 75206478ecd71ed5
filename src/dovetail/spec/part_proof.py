"""Proof: what laws, `verify`, `diff` and surgery ask of a part. It stands beside the part, in the same file; no model needs it.

    @register("alibi")
    class Alibi(Position): …

    class AlibiProof(Proof, of=Alibi):
        samples = {"base": [8.0, 4.0]}

`part.proof` is the companion of a part; a part without one has that of its base.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from dovetail.spec.scope import Scope

if TYPE_CHECKING:
    from dovetail.spec.part import Part


@dc.dataclass(frozen=True)
class FieldCause:
    """The cause that `verify` names where a port has another value of a field, and values that ports confuse it with, beside
    those that follow from its type."""

    cause: str
    values: tuple[Any, ...] = ()


class Proof:
    """The companion of a part; a subclass states what differs from these neutral values."""

    # two to four small legal values per field, for the sampled specs of the laws; a field that holds a part is sampled from
    # every registered kind of its group
    samples: ClassVar[Mapping[str, list[Any]]] = {}
    causes: ClassVar[Mapping[str, FieldCause]] = {}  # by field; `*` for all others
    # field -> the weights (`q` for `q.weight`) and children whose outputs it acts on: a change of the field reinterprets those
    # and no others. A field that is not there acts on every weight of the part
    acts_on: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    training_only: ClassVar[frozenset[str]] = frozenset({"dropout"})  # fields that change nothing outside training

    def __init_subclass__(cls, of: type[Part] | None = None) -> None:
        """`of`: the part that this stands beside."""
        super().__init_subclass__()
        if of is not None:
            of.proof = cls()

    def idle(self, part: Any, scope: Scope) -> frozenset[str]:
        """Fields without effect at this place of the tree (for example `share` in the layer that owns a shared table)."""
        return frozenset()

    def excepts(self, part: Any, scope: Scope) -> dict[str, str]:
        """Laws that cannot hold for this part at this place, with the reason: a prompt that is computed as a whole is neither
        computed in chunks nor rolled back."""
        why = part.whole_prefill(scope)
        return {} if why is None else {"chunked": why, "rollback": why}


def cause_of(part: Part, field: str, path: str) -> FieldCause:
    """What `verify` calls another value of this field of a part at this path; by default the path."""
    causes = part.proof.causes
    return causes.get(field) or causes.get("*") or FieldCause(path)
