"""XLM-RoBERTa: RoBERTa in a hundred languages (Conneau et al. 2019)."""

from __future__ import annotations

from dovetail.hf.dialect.roberta import ROBERTA, named

XLM_ROBERTA = ROBERTA.variant("xlm-roberta", forms=named("XLMRoberta"))
