"""The families we can write and read: one file and one line each."""

from dovetail.port.dialect.gpt2 import GPT2
from dovetail.port.dialect.llama import LLAMA
from dovetail.port.table import Dialect

DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (LLAMA, GPT2)}
