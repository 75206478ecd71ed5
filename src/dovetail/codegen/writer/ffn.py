"""Feed-forwards that every token meets."""

from __future__ import annotations

from dovetail.codegen.code import Call, fill
from dovetail.codegen.registry import Here, writes

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


def _written(here: Here, template: str, other: str, doc: str, **holes: str) -> Call:
    here.file.letter(F="hidden units of the feed-forward")
    text = fill(template, {"dropout": here.part.dropout}, doc=doc, bias=here.part.bias, dropout=here.part.dropout, **holes)
    return Call.to(here.file.define("MLP", text, other), width=here.size("embed"), hidden=here.size("ffn"))


@writes("glu")
def glu(here: Here) -> Call:
    """The gated one."""
    act = here.write("act")
    doc = "The gated feed-forward: one matrix opens or shuts what another lets through."
    return _written(here, GLU, "GatedMLP", doc, gated=act("self.gate(x)"))


@writes("mlp")
def mlp(here: Here) -> Call:
    """The plain one."""
    act = here.write("act")
    doc = "The feed-forward: widen, activate, narrow; each token alone."
    return _written(here, MLP, "PlainMLP", doc, acted=act("self.up(x)"))
