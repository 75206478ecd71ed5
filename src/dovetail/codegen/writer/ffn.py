"""Dense feed-forward networks, and activations, each an expression of an expression."""

from __future__ import annotations

from dovetail.codegen.code import Call, fill
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
