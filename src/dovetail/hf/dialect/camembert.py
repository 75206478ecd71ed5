"""CamemBERT: RoBERTa in French (Martin et al. 2019)."""

from __future__ import annotations

from dovetail.hf.dialect.roberta import ROBERTA, named

CAMEMBERT = ROBERTA.variant("camembert", forms=named("Camembert"))
