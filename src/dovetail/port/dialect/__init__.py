"""The families we can write and read: one file and one line each."""

from dovetail.port.dialect.bart import BART
from dovetail.port.dialect.bert import BERT
from dovetail.port.dialect.bloom import BLOOM
from dovetail.port.dialect.deepseek_v3 import DEEPSEEK_V3
from dovetail.port.dialect.dinov2 import DINOV2
from dovetail.port.dialect.distilbert import DISTILBERT
from dovetail.port.dialect.falcon import FALCON
from dovetail.port.dialect.gemma import GEMMA
from dovetail.port.dialect.gemma2 import GEMMA2
from dovetail.port.dialect.gemma3 import GEMMA3
from dovetail.port.dialect.gpt2 import GPT2
from dovetail.port.dialect.gpt_neox import GPT_NEOX
from dovetail.port.dialect.gpt_oss import GPT_OSS
from dovetail.port.dialect.gptj import GPTJ
from dovetail.port.dialect.granite import GRANITE
from dovetail.port.dialect.jamba import JAMBA
from dovetail.port.dialect.llama import LLAMA
from dovetail.port.dialect.mamba import MAMBA
from dovetail.port.dialect.mamba2 import MAMBA2
from dovetail.port.dialect.mistral import MISTRAL
from dovetail.port.dialect.mixtral import MIXTRAL
from dovetail.port.dialect.modernbert import MODERNBERT
from dovetail.port.dialect.mpt import MPT
from dovetail.port.dialect.olmo2 import OLMO2
from dovetail.port.dialect.opt import OPT
from dovetail.port.dialect.phi3 import PHI3
from dovetail.port.dialect.qwen2 import QWEN2
from dovetail.port.dialect.qwen3 import QWEN3
from dovetail.port.dialect.qwen3_moe import QWEN3_MOE
from dovetail.port.dialect.qwen3_next import QWEN3_NEXT
from dovetail.port.dialect.roberta import ROBERTA
from dovetail.port.dialect.smollm3 import SMOLLM3
from dovetail.port.dialect.stablelm import STABLELM
from dovetail.port.dialect.starcoder2 import STARCODER2
from dovetail.port.dialect.t5 import T5
from dovetail.port.dialect.vit import VIT
from dovetail.port.table import Dialect

# of the families that can say a spec, the first one is written
FAMILIES = (
    LLAMA,
    GPT2,
    MISTRAL,
    QWEN2,
    QWEN3,
    GEMMA,
    GEMMA2,
    PHI3,
    OLMO2,
    GRANITE,
    STARCODER2,
    SMOLLM3,
    GPT_NEOX,
    GPTJ,
    OPT,
    BLOOM,
    FALCON,
    STABLELM,
    MPT,
    GEMMA3,
    BERT,
    T5,
    ROBERTA,
    DISTILBERT,
    BART,
    VIT,
    MODERNBERT,
    DINOV2,
    MIXTRAL,
    MAMBA,
    MAMBA2,
    QWEN3_MOE,
    DEEPSEEK_V3,
    GPT_OSS,
    QWEN3_NEXT,
    JAMBA,
)
DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in FAMILIES}
