"""Mamba: a selective state space model, scanned token by token."""

from __future__ import annotations

from dovetail.codegen.code import Call, fill
from dovetail.codegen.registry import Context, MixerCode, writes
from dovetail.codegen.writer.mamba2 import define_conv

SCAN = '''
def $name(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Selective scan: h_t = e^(dt_t a) * h_(t-1) + (dt_t x_t) b_t^T, and y_t = h_t c_t.

    x, dt (B, N, C), a (C, S) below 0, b, c (B, N, S) -> y (B, N, C)
    """
    dtype, acc = x.dtype, dt.dtype
    x, b, c = (dt * x.to(acc))[..., None], b.to(acc)[..., None, :], c.to(acc)[..., None]
    state, out = dt.new_zeros(dt.shape[0], *a.shape), []  # (B, C, S)
    for t in range(dt.shape[1]):
        state = torch.baddbmm((dt[:, t, :, None] * a).exp() * state, x[:, t], b[:, t])
        out.append((state @ c[:, t])[..., 0])
    return torch.stack(out, 1).to(dtype)
'''

MAMBA = '''
class $name(nn.Module):
    """Selective state space model: step size, input and output depend on the token."""

    def __init__(self, width: int, inner: int, state: int, rank: int):
        super().__init__()
        self.z = nn.Linear(width, inner, bias=$bias)
        self.x = nn.Linear(width, inner, bias=$bias)
        self.low = nn.Linear(inner, rank, bias=False)
        self.b = nn.Linear(inner, state, bias=False)
        self.c = nn.Linear(inner, state, bias=False)
        self.dt = nn.Linear(rank, inner, bias=False)
        self.o = nn.Linear(inner, width, bias=$bias)
        self.low_norm = $low_norm  #? norm
        self.b_norm = $b_norm  #? norm
        self.c_norm = $c_norm  #? norm
        self.conv = nn.Parameter(torch.randn(inner, $taps) * 0.02)
        self.conv_bias = nn.Parameter(torch.zeros(inner))  #? conv_bias
        step = torch.logspace(-3, -1, inner)  # initial step sizes, from 0.001 to 0.1
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # inverse of softplus
        self.a_log = nn.Parameter(torch.arange(1.0, state + 1).log().repeat(inner, 1))
        self.skip = nn.Parameter(torch.ones(inner))

    def forward(self, u: Tensor) -> Tensor:  # (B, N, D) -> (B, N, D)
        x = F.silu(causal_conv(self.x(u), self.conv$with_bias))  # (B, N, C)
        low, b, c = self.low(x), self.b(x), self.c(x)  # (B, N, rank) and twice (B, N, S)
        low, b, c = self.low_norm(low), self.b_norm(b), self.c_norm(c)  #? norm
        dt = F.softplus(self.dt(low).to(at_least_fp32(u.dtype)) + self.dt_bias)  # (B, N, C)
        y = selective_scan(x, dt, -self.a_log.to(dt.dtype).exp(), b, c) + self.skip * x
        return self.o(y * F.silu(self.z(u)))
'''


@writes("mamba")
def mamba(context: Context) -> MixerCode:
    """The mixer, its convolution and its scan."""
    part, file = context.part, context.file
    file.define_at_least_fp32()
    define_conv(file)
    file.define("selective_scan", fill(SCAN))
    file.letter(S="recurrent state per channel", C="channels")
    file.note("Sequences longer than 64 tokens agree with Dovetail up to rounding: it scans them in chunks.")
    norms = {f"{name}_norm": "" for name in ("low", "b", "c")}
    if part.norm is not None:
        dims = {"low_norm": "rank", "b_norm": "state", "c_norm": "state"}
        norms = {name: context.write(name, part.norm).change(dim=dims[name]).flat() for name in norms}
    text = fill(
        MAMBA,
        {"norm": part.norm is not None, "conv_bias": part.conv_bias},
        bias=part.bias,
        taps=part.conv_size,
        with_bias=", self.conv_bias" if part.conv_bias else "",
        **norms,
    )
    sizes = {
        "width": context.size("embed"),
        "inner": context.size("inner"),
        "state": part.state_size,
        "rank": context.size("rank"),
    }
    return MixerCode(Call.to(file.define("Mamba", text), **sizes))
