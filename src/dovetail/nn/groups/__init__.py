"""The groups: one abstract class of parts per role in a model (mixer, norm, ffn …), and the interface of its modules.

Shapes: x (…, n, embed); q (…, n, heads, head); `…` is batch, or nothing for a flat batch.
"""

from __future__ import annotations

from dovetail.nn.groups.act import Act as Act
from dovetail.nn.groups.earlier import Earlier as Earlier, EarlierModule as EarlierModule
from dovetail.nn.groups.embed import Embed as Embed, EmbedModule as EmbedModule
from dovetail.nn.groups.feature import Feature as Feature, FeatureModule as FeatureModule
from dovetail.nn.groups.ffn import Ffn as Ffn
from dovetail.nn.groups.head import Criterion as Criterion, Head as Head, HeadModule as HeadModule
from dovetail.nn.groups.init import Init as Init
from dovetail.nn.groups.mask import Band as Band, Fill as Fill, Mask as Mask, Order as Order, Span as Span
from dovetail.nn.groups.mixer import CrossMixer as CrossMixer, Mixer as Mixer
from dovetail.nn.groups.mtp import (
    AheadInput as AheadInput,
    AheadTerm as AheadTerm,
    Mtp as Mtp,
    MtpModule as MtpModule,
    MtpProof as MtpProof,
)
from dovetail.nn.groups.norm import Norm as Norm
from dovetail.nn.groups.position import Position as Position, PositionModule as PositionModule
from dovetail.nn.groups.router import Router as Router, RouterModule as RouterModule
from dovetail.nn.groups.scaling import WRONG_SCALING as WRONG_SCALING, Scaling as Scaling, ScalingProof as ScalingProof
from dovetail.nn.groups.wire import Steps as Steps, Wire as Wire
from dovetail.spec.part import Part

GROUPS: tuple[type[Part], ...] = (
    *(Mixer, Position, Earlier, Feature, Scaling, Mask, Norm, Wire),
    *(Ffn, Router, Act, Embed, Head, Mtp, Init),
)
