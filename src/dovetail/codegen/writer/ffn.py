"""Feed-forward networks: dense, a mixture of experts (MoE) with its router, and activations, each an expression of an
expression."""

from __future__ import annotations

from dovetail.codegen.code import Call, fill, signature
from dovetail.codegen.registry import Act, Context, writes

GLU = '''
class $name(nn.Module):
    """$doc"""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=$bias)
        self.up = nn.Linear(width, hidden, bias=$bias)
        self.down = nn.Linear(hidden, width, bias=$bias)
        self.dropout = nn.Dropout($dropout)  #? dropout

    def forward(self, x: Tensor) -> Tensor:  # (B, N, D) -> (B, N, D)
        hidden = $gated * self.up(x)  # (B, N, F)
        return self.down(hidden)  #? not dropout
        return self.down(self.dropout(hidden))  #? dropout
'''

MLP = '''
class $name(nn.Module):
    """$doc"""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=$bias)
        self.down = nn.Linear(hidden, width, bias=$bias)
        self.dropout = nn.Dropout($dropout)  #? dropout

    def forward(self, x: Tensor) -> Tensor:  # (B, N, D) -> (B, N, D)
        hidden = $acted  # (B, N, F)
        return self.down(hidden)  #? not dropout
        return self.down(self.dropout(hidden))  #? dropout
'''


def _written(context: Context, template: str, other: str, doc: str, **placeholders: str) -> Call:
    context.file.letter(F="hidden units of the feed-forward")
    text = fill(
        template,
        {"dropout": context.part.dropout},
        doc=doc,
        bias=context.part.bias,
        dropout=context.part.dropout,
        **placeholders,
    )
    return Call.to(context.file.define("MLP", text, other), width=context.size("embed"), hidden=context.size("ffn"))


@writes("glu")
def glu(context: Context) -> Call:
    """Gated."""
    act = context.write("act")
    doc, factor = "Gated feed-forward network: down(act(gate(x)) * up(x)).", context.part.gate_multiplier
    return _written(context, GLU, "GatedMLP", doc, gated=act("self.gate(x)" if factor == 1.0 else f"self.gate(x) * {factor}"))


@writes("mlp")
def mlp(context: Context) -> Call:
    """Not gated."""
    act = context.write("act")
    doc = "Feed-forward network: down(act(up(x)))."
    return _written(context, MLP, "PlainMLP", doc, acted=act("self.up(x)"))


QUICK_GELU = '''
def $name(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x), an approximation of GELU."""
    return x * torch.sigmoid(1.702 * x)
'''


ACTS = {
    "relu": "F.relu({})",
    "relu2": "F.relu({}).square()",
    "gelu": "F.gelu({})",
    "gelu_tanh": 'F.gelu({}, approximate="tanh")',
    "silu": "F.silu({})",
    "sigmoid": "torch.sigmoid({})",
    "tanh": "torch.tanh({})",
    "identity": "{}",
}


@writes(*ACTS)
def act(context: Context) -> Act:
    """An expression of torch's functions."""
    return ACTS[context.part.kind].format


@writes("quick_gelu")
def quick_gelu(context: Context) -> Act:
    """x · σ(1.702 x)."""
    return (context.file.define("quick_gelu", fill(QUICK_GELU)) + "({})").format


ROUTER = '''
class $name(nn.Module):
    """Top-$k routing: the experts of each token and their weights."""

    def __init__(self, width: int, experts: int):
        super().__init__()
        self.out = nn.Linear(width, experts, bias=$bias)
        self.norm = $norm  #? norm
        self.expert_scale = nn.Parameter(torch.ones(experts))  # a factor of each expert  #? expert_scale
        self.register_buffer("balance", torch.zeros(experts))  # acts on the choice, not on weights  #? balance

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # (B, N, D) -> 2 x (B, N, k)
        acc = at_least_fp32(x.dtype)
        x = self.norm(x)  #? norm
        x = x.to(acc) * $input_scale  #? input_scale
        logits = F.linear(x.to(acc), self.out.weight.to(acc))  # (B, N, E)  #? not bias
        logits = F.linear(x.to(acc), self.out.weight.to(acc), self.out.bias.to(acc))  # (B, N, E)  #? bias
        scores = logits.$scored
        ranked = scores + self.balance  #? balance
        ranked = scores  #? groups not balance
        grouped = ranked.unflatten(-1, ($groups, -1))  # (B, N, $groups, E / $groups)  #? groups
        worth = grouped.topk($best, -1).values.sum(-1)  # of each group: its best $best  #? groups
        among = torch.zeros_like(worth, dtype=torch.bool)  #? groups
        among = among.scatter(-1, worth.topk($top_groups, -1).indices, True)  #? groups
        ranked = grouped.masked_fill(~among[..., None], -torch.inf).flatten(-2)  #? groups
        chosen = $ranked.topk($k, -1).indices
        weights = scores.gather(-1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)$least  #? normalize
        weights = weights * $scale  #? scale
        weights = weights * self.expert_scale.to(acc)[chosen]  #? expert_scale
        return chosen, weights
'''

BANK = '''
class $name(nn.Module):
    """The experts: $what; a token is processed by those it is routed to."""

    def __init__(self, width: int, hidden: int, experts: int):
        super().__init__()
        self.gate = $matrices(experts, hidden, width)  #? gated
        self.up = $matrices(experts, hidden, width)
        self.down = $matrices(experts, width, hidden)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:  # (B, N, D)
        expert, order = chosen.flatten().sort(stable=True)  # (B * N * k,) all choices, by expert
        counts = expert.bincount(minlength=len(self.up.weight)).tolist()
        rows = x.flatten(0, 1)[order // chosen.shape[-1]]  # (B * N * k, D) the token of each choice
        gate = self.gate(rows, counts)  #? gated
        up = self.up(rows, counts)
        gate, up = gate.clamp(max=$limit), up.clamp(-$limit, $limit)  #? limit
        hidden = $hidden  # (B * N * k, F)
        rows = self.down(hidden, counts)
        rows = rows[order.argsort()].view(*chosen.shape, -1)  # (B, N, k, D): in the original order
        return (rows * weights[..., None]).sum(-2).to(x.dtype)
'''

BY_EXPERT = '''
class $name(nn.Module):
    """A matrix per expert: the first counts[0] rows are expert 0's, and so on."""

    def __init__(self, experts: int, out: int, inp: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, out, inp) * 0.02)
        self.bias = nn.Parameter(torch.zeros(experts, out))  #? bias

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:  # (rows, inp) -> (rows, out)
        runs = zip(rows.split(counts), self.weight, strict=True)  #? not bias
        return torch.cat([run @ weight.T for run, weight in runs])  #? not bias
        runs = zip(rows.split(counts), self.weight, self.bias, strict=True)  #? bias
        return torch.cat([run @ weight.T + bias for run, weight, bias in runs])  #? bias
'''

EXPERTS = '''
class $name(nn.Module):
    """Mixture of experts: each token is processed by a few of many feed-forward networks."""

    $init
        super().__init__()
        self.router = router
        self.bank = bank
        self.norm = norm  #? norm
        self.shared = shared  #? shared
        self.shared_gate = nn.Linear(width, 1, bias=False)  #? shared_gate
        self.to_latent = nn.Linear(width, latent, bias=False)  #? latent
        self.from_latent = nn.Linear(latent, width, bias=False)  #? latent

    def forward(self, x: Tensor) -> Tensor:  # (B, N, D) -> (B, N, D)
        chosen, weights = self.router(x)  #? norm
        x = self.norm(x)  #? norm
        return $routed  #? not shared
        out = $routed  #? shared
        return out + self.shared(x)  #? shared not shared_gate
        return out + self.shared(x) * torch.sigmoid(self.shared_gate(x))  #? shared_gate
'''

TRAINING = {
    "balance_loss": "the router's balancing loss",
    "z_loss": "the router's z-loss",
    "noise": "the router's noise",
    "capacity": "the experts' capacity",
    "balance_bias": "moving the router's balance",
}


def _router(context: Context, scored: str, least: str) -> Call:
    """A router that scores every expert and takes the best."""
    part = context.part
    flags = {
        "bias": part.bias,
        "balance": part.balance_bias,
        "groups": part.groups > 1,
        "normalize": part.normalize,
        "scale": part.scale != 1.0,
        "norm": part.norm is not None,
        "input_scale": part.input_scale != 1.0,
        "expert_scale": part.expert_scale,
    }
    for field, what in TRAINING.items():
        if getattr(part, field):
            context.file.note(f"Not written, as it acts only in training: {what}.")
    context.file.letter(E="experts", k="experts per token")
    context.file.define_at_least_fp32()
    moved = part.balance_bias or part.groups > 1
    text = fill(
        ROUTER,
        flags,
        k=part.top_k,
        bias=part.bias,
        scored=scored,
        groups=part.groups,
        best=part.best,
        top_groups=part.top_groups,
        ranked="ranked" if moved else "scores",
        least=least,
        scale=part.scale,
        norm=context.write("norm").change(dim="width").flat() if part.norm is not None else "",
        input_scale=part.input_scale,
    )
    return Call.to(context.file.define("Router", text), width=context.size("embed"), experts=context.size("experts"))


@writes("softmax_router")
def softmax_router(context: Context) -> Call:
    """Softmax over all experts: the sum of the largest probabilities is never 0, so dividing by it is safe."""
    return _router(context, "softmax(-1)", "")


@writes("sigmoid_router")
def sigmoid_router(context: Context) -> Call:
    """A sigmoid per expert: all may be 0, so the sum is clamped."""
    return _router(context, "sigmoid()", ".clamp_min(torch.finfo(acc).tiny)")


@writes("bank")
def bank(context: Context) -> Call:
    """The weights of all experts."""
    of = context.part.of
    flags = {"gated": of.gated, "bias": of.bias, "limit": of.limit is not None}
    act = context.write("act", of.act)
    matrices = context.file.define("ExpertLinear", fill(BY_EXPERT, {"bias": of.bias}))
    up = "(up + 1.0)" if of.plus_one else "up"
    text = fill(
        BANK,
        flags,
        what="gated feed-forwards" if of.gated else "feed-forwards",
        hidden=f"{act('gate')} * {up}" if of.gated else act("up"),
        limit=of.limit,
        matrices=matrices,
    )
    width = context.size("embed" if of.latent is None else "latent")
    sizes = {"width": width, "hidden": context.size("ffn"), "experts": context.size("experts")}
    context.file.letter(F="hidden units of the feed-forward")
    return Call.to(context.file.define("Experts", text), **sizes)


@writes("moe")
def experts(context: Context) -> Call:
    """A router, the experts, perhaps a shared expert."""
    part = context.part
    flags = {"shared": part.shared is not None, "shared_gate": part.shared_gate}
    flags |= {"latent": part.latent is not None, "norm": part.norm is not None}
    children = {name: context.write(name, child) for name, child in part.children().items()}
    given = [f"{name}: nn.Module" for name in children]
    sizes = {"width": context.size("embed")} if part.shared_gate or part.latent is not None else {}
    sizes |= {} if part.latent is None else {"latent": part.latent}
    given, children = [*given, *(f"{name}: int" for name in sizes)], {**children, **sizes}
    chosen = "*self.router(x)" if part.norm is None else "chosen, weights"
    routed = f"self.bank(x, {chosen})"
    if part.latent is not None:
        routed = f"self.from_latent(self.bank(self.to_latent(x), {chosen}))"
    text = fill(EXPERTS, flags, init=signature("__init__", given), routed=routed)
    return Call.to(context.file.define("MixtureOfExperts", text), **children).opened()
