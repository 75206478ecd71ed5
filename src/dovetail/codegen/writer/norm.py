"""Norms over the last dimension."""

from __future__ import annotations

from dovetail.codegen.code import Call, fill
from dovetail.codegen.registry import Context, writes

RMS = '''
class $name(nn.Module):
    """x / sqrt(mean(x^2) + eps) * scale, over the last dimension."""  #? not plus_one
    """x / sqrt(mean(x^2) + eps) * (1 + scale), over the last dimension."""  #? plus_one

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(dim))  #? not plus_one
        self.scale = nn.Parameter(torch.zeros(dim))  # the distance from 1  #? plus_one

    def forward(self, x: Tensor) -> Tensor:  # (..., dim) -> (..., dim)
        return F.rms_norm(x, (x.shape[-1],), self.scale, self.eps)  #? not plus_one
        return F.rms_norm(x, (x.shape[-1],), self.scale + 1.0, self.eps)  #? plus_one
'''

LAYER = '''
class $name(nn.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) * scale + shift, over the last dimension."""  #? shift
    """(x - mean(x)) / sqrt(var(x) + eps) * scale, over the last dimension."""  #? not shift

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(dim))  #? not plus_one
        self.scale = nn.Parameter(torch.zeros(dim))  # the distance from 1  #? plus_one
        self.shift = nn.Parameter(torch.zeros(dim))  #? shift

    def forward(self, x: Tensor) -> Tensor:  # (..., dim) -> (..., dim)
        return F.layer_norm(x, (x.shape[-1],), $scale, self.shift, self.eps)  #? shift
        return F.layer_norm(x, (x.shape[-1],), $scale, None, self.eps)  #? not shift
'''


@writes("rmsnorm")
def rms(context: Context) -> Call:
    """RMSNorm."""
    text = fill(RMS, {"plus_one": context.part.plus_one})
    name = context.file.define("RMSNorm", text, "OffsetRMSNorm" if context.part.plus_one else "PlainRMSNorm")
    return Call.to(name, dim=context.size("dim"), eps=context.part.eps)


@writes("layernorm")
def layernorm(context: Context) -> Call:
    """LayerNorm."""
    shift, plus_one = context.part.shift, context.part.plus_one
    text = fill(LAYER, {"shift": shift, "plus_one": plus_one}, scale="self.scale + 1.0" if plus_one else "self.scale")
    name = context.file.define("LayerNorm", text, "OffsetLayerNorm" if plus_one else "")
    return Call.to(name, dim=context.size("dim"), eps=context.part.eps)
