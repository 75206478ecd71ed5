"""Whether the search of the built site finds the words that people type.

    python -m sphinx -q -W --keep-going -b html docs docs/_build/html
    python docs/search_terms.py [docs/_build/html]

Reads searchindex.js as the search page does: every word of a query is a stem, in titles or in text, and a page is found if it
has all of them. Exits with 1 and names the queries without a page.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from sphinx.search.en import SearchEnglish

QUERIES = (
    "KV cache", "paged attention", "GQA", "MLA", "MoE", "router", "RoPE", "ALiBi", "YaRN", "sliding window",
    "Mamba", "Gated DeltaNet", "RWKV", "linear attention", "encoder decoder", "LoRA", "QLoRA", "DoRA", "DPO", "GRPO",
    "FSDP", "tensor parallel", "pipeline", "ring attention", "checkpoint", "resume", "Muon", "learning rate", "mixed precision",
    "quantization", "int8", "NF4", "GPTQ", "speculative", "beam search", "hook", "activations", "logits", "tokenizer",
    "safetensors", "Hugging Face", "vLLM", "OpenAI", "embeddings", "perplexity", "attention mask", "padding", "gradient",
)  # fmt: skip


def missing(site: Path) -> list[str]:
    """The queries that find no page."""
    text = (site / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text[text.index("{") : text.rindex("}") + 1])
    language = SearchEnglish({})
    return [query for query in QUERIES if not pages(index, [language.stem(word.lower()) for word in query.split()])]


def pages(index: dict[str, Any], stems: list[str]) -> set[int]:
    """The pages that have all of these stems, in text or title."""
    found = [as_set(index["terms"].get(stem)) | as_set(index["titleterms"].get(stem)) for stem in stems]
    return set.intersection(*found)


def as_set(entry: int | list[int] | None) -> set[int]:
    """An entry of the index: a page, several, or none."""
    return set() if entry is None else {entry} if isinstance(entry, int) else {*entry}


def main() -> int:
    """Check a built site."""
    root = Path(__file__).parent
    absent = missing(Path(sys.argv[1]) if len(sys.argv) > 1 else root / "_build/html")
    sys.stdout.write(f"{len(QUERIES)} queries; without a page: {', '.join(absent) or 'none'}\n")
    return int(bool(absent))


if __name__ == "__main__":
    sys.exit(main())
