"""The roles of a class that `foreign.py` tests: how it is called with token ids, and which laws it should obey.

causal     a causal language model, as it is
encoder    a masked language model, as it is: it reads in both directions and has no cache
decoder    the decoder of an encoder–decoder, beside one source text that all rows share
source     the encoder of an encoder–decoder: the decoder must not see the padding of a source
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

SOURCE, TARGET = 11, 5  # tokens of the source beside a decoder, and of the target beside a source
BOTH_DIRECTIONS = ("padded", "compiled", "gradient", "every_weight")


class Decoder(nn.Module):
    """An encoder–decoder as a function of its target tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.config = model, model.config
        self.register_buffer("source", torch.arange(3, 3 + SOURCE)[None], persistent=False)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
    ) -> Any:
        source = self.source.expand(len(input_ids), -1)
        return self.model(
            input_ids=source,
            attention_mask=torch.ones_like(source),
            decoder_input_ids=input_ids,
            decoder_attention_mask=attention_mask,
            past_key_values=past_key_values,
            use_cache=use_cache,
        )


class Source(nn.Module):
    """An encoder–decoder as a function of its source tokens: the encoder output of each, and the logits of a fixed target.

    The logits are appended to the features of every source token, so that padding which the encoder ignores and the decoder's
    cross attention reads is seen as well.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.config = model, model.config
        self.register_buffer("target", torch.arange(3, 3 + TARGET)[None], persistent=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        out = self.model(
            input_ids=input_ids,
            attention_mask=mask,
            decoder_input_ids=self.target.expand(len(input_ids), -1),
            use_cache=False,
        )
        encoded, logits = out.encoder_last_hidden_state, out.logits.flatten(1)
        return torch.cat([encoded, logits[:, None].expand(-1, encoded.shape[1], -1)], -1)


@dc.dataclass(frozen=True)
class Role:
    """A role: the mapping of transformers that lists its classes, the laws, and the module that is tested."""

    mapping: str
    laws: tuple[str, ...] = ()  # all
    wrap: Callable[[Any], nn.Module] = lambda model: model
    causal: bool = False  # its config is that of a decoder
    except_of: str | None = None  # a mapping whose classes belong to another role


SEQ2SEQ = "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING"
ROLES: dict[str, Role] = {
    "causal": Role("MODEL_FOR_CAUSAL_LM_MAPPING", causal=True),
    "encoder": Role("MODEL_FOR_MASKED_LM_MAPPING", BOTH_DIRECTIONS, except_of=SEQ2SEQ),
    "decoder": Role(SEQ2SEQ, wrap=Decoder),
    "source": Role(SEQ2SEQ, ("padded",), wrap=Source),
}
