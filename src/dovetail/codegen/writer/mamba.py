"""Mamba: a selective state space model, scanned token by token; Mamba-2: one computed by matmuls over chunks."""

from __future__ import annotations

from dovetail.codegen.code import Call, File, fill
from dovetail.codegen.registry import Context, MixerCode, writes
from dovetail.ops.implementation import CHUNK
from dovetail.ops.scan.decay import LEAST

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


CONV = '''
def $name(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Depthwise causal convolution. x (B, N, C), weight (C, kernel size)."""
    n, back = x.shape[1], weight.shape[1] - 1
    longer = F.pad(x, (0, 0, back, 0))  # zeros before the first token
    y = longer[:, back:] * weight[:, back]
    for d in range(1, back + 1):
        y = y + longer[:, back - d : back - d + n] * weight[:, back - d]
    return y if bias is None else y + bias
'''

DECAY_SCAN = '''
def $name(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Scan with decay: S_t = e^(g_t) S_(t-1) + k_t v_t^T, and y_t = S_t^T q_t.

    Matmuls over chunks of at most $chunk tokens; the recurrent state S goes from chunk to chunk.
    q, k (B, N, groups, S): the heads of a group share them; v (B, N, H, K);
    g (B, N, H) at most 0 -> y (B, N, H, K)
    """
    dtype, acc, n = q.dtype, at_least_fp32(q.dtype), q.shape[1]
    size = min(max($least, int((k.shape[-1] * v.shape[-1]) ** 0.5)), $chunk, n)
    rest = -n % size  # right padding: tokens that add nothing and do not decay
    q, k, v = (F.pad(t.to(acc), (0, 0, 0, 0, 0, rest)) for t in (q, k, v))
    g = F.pad(g.to(acc), (0, 0, 0, rest))
    groups, share, value = q.shape[2], v.shape[2] // q.shape[2], v.shape[-1]
    q, k = (t.unflatten(1, (-1, size)).transpose(2, 3) for t in (q, k))  # (B, C, groups, size, S)
    v, g = (t.unflatten(1, (-1, size)).unflatten(3, (groups, share)) for t in (v, g))
    v = v.permute(0, 1, 3, 4, 2, 5)  # (B, C, groups, share, size, K)
    c = g.permute(0, 1, 3, 4, 2).cumsum(-1)  # (B, C, groups, share, size), log decay
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    fade = (c[..., :, None] - c[..., None, :]).masked_fill(later, -torch.inf).exp()
    scores = (q @ k.transpose(-1, -2))[..., None, :, :]
    inside = (scores * fade) @ v  # within a chunk
    fading = v * (c[..., -1:] - c).exp()[..., None]
    added = k.transpose(-1, -2) @ fading.transpose(3, 4).flatten(-2)  # (B, C, groups, S, share*K)
    through = c[..., -1].exp().repeat_interleave(value, -1)[..., None, :]
    state, states = torch.zeros_like(added[:, 0]), []
    for new, left in zip(added.unbind(1), through.unbind(1), strict=True):  # chunk by chunk
        states.append(state)  # before the chunk
        state = torch.addcmul(new, left, state)
    before = (q @ torch.stack(states, 1)).unflatten(-1, (-1, value)).transpose(3, 4)
    y = inside + c.exp()[..., None] * before
    return y.permute(0, 1, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2)[:, :n].to(dtype)
'''

MAMBA2 = '''
class $name(nn.Module):
    """State space model: each token writes to the state (b), decays it (dt) and reads it (c)."""

    $init
        super().__init__()
        self.head, self.state = head, state
        self.z = nn.Linear(width, heads * head, bias=$bias)
        self.x = nn.Linear(width, heads * head, bias=$bias)
        self.b = nn.Linear(width, groups * state, bias=$bias)
        self.c = nn.Linear(width, groups * state, bias=$bias)
        self.dt = nn.Linear(width, heads, bias=False)
        self.o = nn.Linear(heads * head, width, bias=$bias)
        self.conv_x = nn.Parameter(torch.randn(heads * head, $taps) * 0.02)
        self.conv_b = nn.Parameter(torch.randn(groups * state, $taps) * 0.02)
        self.conv_c = nn.Parameter(torch.randn(groups * state, $taps) * 0.02)
        self.conv_x_bias = nn.Parameter(torch.zeros(heads * head))  #? conv_bias
        self.conv_b_bias = nn.Parameter(torch.zeros(groups * state))  #? conv_bias
        self.conv_c_bias = nn.Parameter(torch.zeros(groups * state))  #? conv_bias
        step = torch.logspace(-3, -1, heads)  # initial step sizes, from 0.001 to 0.1
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # inverse of softplus
        self.a_log = nn.Parameter(torch.linspace(1, 16, heads).log())
        self.skip = nn.Parameter(torch.ones(heads))
        self.norm = $norm  #? norm

    def forward(self, u: Tensor) -> Tensor:  # (B, N, D) -> (B, N, D)
        x = F.silu(causal_conv($x, self.conv_x$x_bias))
        b = F.silu(causal_conv($b, self.conv_b$b_bias))
        c = F.silu(causal_conv($c, self.conv_c$c_bias))
        x = x.unflatten(-1, (-1, self.head))  # (B, N, H, K)
        b, c = (t.unflatten(-1, (-1, self.state)) for t in (b, c))  # (B, N, groups, S)
        dt = F.softplus($dt.to(at_least_fp32(u.dtype)) + self.dt_bias)  # (B, N, H)
        dt = dt.clamp($dt_min, $dt_max)  #? clamps
        fading = -self.a_log.to(dt.dtype).exp() * dt  # log decay per step
        y = decay_scan(c, b, x.to(dt.dtype) * dt[..., None], fading)  # (B, N, H, K)
        y = y + self.skip[:, None] * x
        return self.o(y.flatten(-2) * F.silu($z))  #? not norm
        return self.o(self.norm(y.flatten(-2) * F.silu($z)))  #? norm not before
        return self.o(self.norm(y.flatten(-2)) * F.silu($z))  #? before
'''


def define_conv(file: File) -> None:
    """Define the function `causal_conv` in the file."""
    file.define("causal_conv", fill(CONV))


def define_decay_scan(file: File) -> None:
    """Define the function `decay_scan` in the file, and `at_least_fp32`, which it calls."""
    file.define_at_least_fp32()
    file.define("decay_scan", fill(DECAY_SCAN, chunk=CHUNK, least=LEAST))


@writes("mamba2")
def mamba2(context: Context) -> MixerCode:
    """The mixer, its convolution and its scan."""
    part, file = context.part, context.file
    define_conv(file)
    define_decay_scan(file)
    file.letter(H="heads", K="head size", S="recurrent state per channel", C="channels, or chunks")
    flags = {"conv_bias": part.conv_bias, "norm": part.norm is not None, "before": part.norm_before_gate}
    flags |= {"clamps": part.dt_min > 0 or part.dt_max is not None}
    factors = zip(("z", "x", "b", "c", "dt"), part.multipliers, strict=True)
    projected = {name: f"self.{name}(u)" if factor == 1.0 else f"self.{name}(u) * {factor}" for name, factor in factors}
    if part.multipliers[-1] != 1.0:
        projected["dt"] = f"({projected['dt']})"  # a method is called on it
    biases = {f"{name}_bias": f", self.conv_{name}_bias" if part.conv_bias else "" for name in "xbc"}
    sizes = {"width": context.size("embed"), "heads": context.size("heads"), "head": part.head}
    sizes |= {"groups": part.groups, "state": part.state_size}
    text = fill(
        MAMBA2,
        flags,
        init=f"def __init__(self, {', '.join(f'{name}: int' for name in sizes)}):",
        bias=part.bias,
        taps=part.conv_size,
        norm="" if part.norm is None else context.write("norm").change(dim="heads * head").flat(),
        dt_min=part.dt_min,
        dt_max=part.dt_max,
        **projected,
        **biases,
    )
    return MixerCode(Call.to(file.define("Mamba2", text), **sizes))
