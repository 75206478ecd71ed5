"""Norms over the last dimension."""

from __future__ import annotations

from dovetail.codegen.code import Call, fill
from dovetail.codegen.registry import Context, writes

RMS = '''
class $name(nn.Module):
    """x / sqrt(mean(x^2) + eps)$times, over $what."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(dim))  #? scale not plus_one
        self.scale = nn.Parameter(torch.zeros(dim))  # the distance from 1  #? scale plus_one

    def forward(self, x: Tensor) -> Tensor:  # (..., dim) -> (..., dim)
        return F.rms_norm(x, (x.shape[-1],), $scale, self.eps)  #? not groups
        x = x.unflatten(-1, ($count, -1))  #? groups
        return F.rms_norm(x, (x.shape[-1],), None, self.eps).flatten(-2)$bracketed  #? groups
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
    part = context.part
    what = "the last dimension" if part.groups == 1 else f"each of {part.groups} groups of the last dimension"
    scale, factor = ("self.scale + 1.0", "(1 + scale)") if part.plus_one else ("self.scale", "scale")
    text = fill(
        RMS,
        {"scale": part.scale, "plus_one": part.plus_one, "groups": part.groups > 1},
        what=what,
        scale=scale if part.scale else "None",
        times=f" * {factor}" if part.scale else "",
        count=part.groups,
        bracketed="" if not part.scale else f" * ({scale})" if part.plus_one else f" * {scale}",
    )
    kinds = {"GroupedRMSNorm": part.groups > 1, "FreeRMSNorm": not part.scale, "OffsetRMSNorm": part.plus_one}
    other = next((name for name, is_it in kinds.items() if is_it), "PlainRMSNorm")
    name = context.file.define("RMSNorm", text, other)
    return Call.to(name, dim=context.size("dim"), eps=context.part.eps)


@writes("layernorm")
def layernorm(context: Context) -> Call:
    """LayerNorm."""
    shift, plus_one = context.part.shift, context.part.plus_one
    text = fill(LAYER, {"shift": shift, "plus_one": plus_one}, scale="self.scale + 1.0" if plus_one else "self.scale")
    name = context.file.define("LayerNorm", text, "OffsetLayerNorm" if plus_one else "")
    return Call.to(name, dim=context.size("dim"), eps=context.part.eps)
