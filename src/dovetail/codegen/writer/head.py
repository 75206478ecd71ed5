"""Heads: from the residual stream to the output."""

from __future__ import annotations

from collections.abc import Mapping

from dovetail.codegen.code import Call, fill
from dovetail.codegen.registry import Context, HeadCode, writes

POOLS = {
    "first": "x[:, 0]  # (B, D): the first token",
    "last": "x[:, -1]  # (B, D): the last token",
    "mean": "x.sum(1) / x.shape[1]  # (B, D)",
}

LM = '''
class $name(nn.Module):
    """LM head: a logit for every token of the vocabulary."""

    def __init__(self, $given):
        super().__init__()
        self.out = nn.Linear(width, vocab, bias=False)  #? not tied
        self.bias = nn.Parameter(torch.zeros(vocab))  #? bias

    def forward(self, x: Tensor) -> Tensor:  # (B, N, D) -> (B, N, V)  #? not tied
        return self.out(x)  #? not tied not bias
        return self.out(x) + self.bias  #? not tied bias
    def forward(self, x: Tensor, table: Tensor) -> Tensor:  # (B, N, D) -> (B, N, V)  #? tied
        return F.linear(x, table, self.bias)  #? tied
'''

MASKED = '''
class $name(nn.Module):
    """Masked-LM head: a dense layer, a norm, then a logit for every token of the vocabulary."""

    def __init__(self, $given):
        super().__init__()
        self.dense = nn.Linear(width, width, bias=$dense_bias)
        self.norm = $norm
        self.out = nn.Linear(width, vocab, bias=False)  #? not tied
        self.bias = nn.Parameter(torch.zeros(vocab))  #? bias

    def forward(self, x: Tensor) -> Tensor:  # (B, N, D) -> (B, N, V)  #? not tied
    def forward(self, x: Tensor, table: Tensor) -> Tensor:  # (B, N, D) -> (B, N, V)  #? tied
        x = self.norm($acted)
        return self.out(x)  #? not tied not bias
        return self.out(x) + self.bias  #? not tied bias
        return F.linear(x, table)  #? tied not bias
        return F.linear(x, table, self.bias)  #? tied bias
'''

BY_CLASS = '''
class $name(nn.Module):
    """Classifier: a logit for every class."""

    def __init__(self, width: int, classes: int):
        super().__init__()
        self.dense = nn.Linear(width, width, bias=$dense_bias)  #? dense
        self.norm = $norm  #? norm
        self.dropout = nn.Dropout($dropout)  #? dropout
        self.out = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:  # (..., D) -> (..., classes)
        x = $acted  #? dense
        x = self.norm(x)  #? norm
        x = self.dropout(x)  #? dropout
        return self.out(x)
'''

POOLED = '''
class $name(nn.Module):
    """$doc"""

    def __init__(self, width: int):
        super().__init__()
        self.out = nn.Linear(width, $out)

    def forward(self, x: Tensor) -> Tensor:  # (B, D) -> (B, $shape)
        return $applied
'''


def _given(sizes: Mapping[str, int]) -> str:
    """Sizes as arguments with their types."""
    return ", ".join(f"{name}: int" for name in sizes)


@writes("lm")
def lm(context: Context) -> HeadCode:
    """Logits, by the embedding's own table or another."""
    part = context.part
    context.file.letter(V="vocabulary")
    call, applied, again = None, "F.linear(x, self.embed.table)", "  # tied to the embedding" if part.tied else ""
    if part.bias or not part.tied:
        sizes = {"vocab": context.size("vocab"), **({} if part.tied else {"width": context.size("embed")})}
        text = fill(LM, {"tied": part.tied, "bias": part.bias}, given=_given(sizes))
        call = Call.to(context.file.define("LMHead", text), **sizes)
        applied = "self.head(x, self.embed.table)" if part.tied else "self.head(x)"
    if part.scale != 1.0:
        applied = f"{applied} * {part.scale}"
    if part.softcap is None:
        return HeadCode(call, f"return {applied}{again}", "(B, N, V)")
    lines = f"logits = {applied}{again}\nreturn {part.softcap} * torch.tanh(logits / {part.softcap})"
    return HeadCode(call, lines, "(B, N, V)")


@writes("masked_lm")
def masked_lm(context: Context) -> HeadCode:
    """Logits behind a dense layer, an activation and a norm."""
    part = context.part
    context.file.letter(V="vocabulary")
    vocab = {} if part.tied and not part.bias else {"vocab": context.size("vocab")}
    sizes = {**vocab, "width": context.size("embed")}
    text = fill(
        MASKED,
        {"tied": part.tied, "bias": part.bias},
        dense_bias=part.dense_bias,
        norm=context.write("norm").flat(),
        acted=context.write("act")("self.dense(x)"),
        given=_given(sizes),
    )
    call = Call.to(context.file.define("MaskedHead", text), **sizes)
    return HeadCode(call, "return self.head(x, self.embed.table)" if part.tied else "return self.head(x)", "(B, N, V)")


def _by_class(context: Context) -> Call:
    """The scores, with or without a layer of their own."""
    part = context.part
    flags = {"dense": part.act is not None, "norm": part.norm is not None, "dropout": bool(part.dropout)}
    text = fill(
        BY_CLASS,
        flags,
        dense_bias=part.dense_bias,
        norm="" if part.norm is None else context.write("norm").flat(),
        acted="" if part.act is None else context.write("act")("self.dense(x)"),
        dropout=part.dropout,
    )
    return Call.to(context.file.define("Classifier", text), width=context.size("embed"), classes=part.classes)


@writes("classifier")
def classifier(context: Context) -> HeadCode:
    """Logits over classes per row."""
    return HeadCode(_by_class(context), f"x = {POOLS[context.part.pooling]}\nreturn self.head(x)", "(B, classes)")


@writes("token_classifier")
def token_classifier(context: Context) -> HeadCode:
    """One class for every token."""
    return HeadCode(_by_class(context), "return self.head(x)", "(B, N, classes)")


@writes("next_sentence")
def next_sentence(context: Context) -> HeadCode:
    """Whether the second text of a row follows the first."""
    text = fill(BY_CLASS, {"dense": True, "norm": False, "dropout": False}, dense_bias=True, acted="torch.tanh(self.dense(x))")
    call = Call.to(context.file.define("NextSentence", text), width=context.size("embed"), classes=2)
    return HeadCode(call, f"x = {POOLS['first']}\nreturn self.head(x)", "(B, 2)")


@writes("pooled_embedding")
def pooled_embedding(context: Context) -> HeadCode:
    """One vector per row."""
    part, call, lines = context.part, None, [f"x = {POOLS[context.part.pooling]}"]
    if part.dense:
        doc = "One vector for the whole row: tanh(W x + b)."
        text = fill(POOLED, doc=doc, out="width", shape="D", applied="torch.tanh(self.out(x))")
        call = Call.to(context.file.define("Pooler", text), width=context.size("embed"))
        lines.append("x = self.head(x)")
    lines.append("return F.normalize(x, dim=-1)" if part.unit else "return x")
    if lines[-2:] == ["x = self.head(x)", "return x"]:
        lines[-2:] = ["return self.head(x)"]
    return HeadCode(call, "\n".join(lines), "(B, D)")


@writes("reward")
def reward(context: Context) -> HeadCode:
    """One number per row."""
    text = fill(POOLED, doc="One number for the whole row.", out="1, bias=False", shape="1", applied="self.out(x)")
    call = Call.to(context.file.define("ScalarHead", text), width=context.size("embed"))
    return HeadCode(call, f"x = {POOLS[context.part.pooling]}\nreturn self.head(x)", "(B, 1)")
