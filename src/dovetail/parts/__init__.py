"""The parts that come with Dovetail: one line per file, which registers its kinds and exports its classes.

    spec.swap("position", dt.parts.Alibi())          isinstance(block.mixer, dt.parts.Attention)

A package of a user registers its own parts by the entry point `dovetail.parts`.
"""

from importlib.metadata import entry_points

from dovetail.parts.act import (
    Gelu as Gelu,
    GeluTanh as GeluTanh,
    Identity as Identity,
    QuickGelu as QuickGelu,
    Relu as Relu,
    Relu2 as Relu2,
    Sigmoid as Sigmoid,
    Silu as Silu,
    Tanh as Tanh,
)
from dovetail.parts.block import ExpertBlock as ExpertBlock, HybridBlock as HybridBlock
from dovetail.parts.earlier import SharedKV as SharedKV, ValueResidual as ValueResidual
from dovetail.parts.embed import Patches as Patches, Tokens as Tokens, TokensAndPatches as TokensAndPatches
from dovetail.parts.feature import EluFeatures as EluFeatures, RandomFeatures as RandomFeatures, ReluFeatures as ReluFeatures
from dovetail.parts.ffn.dense import Glu as Glu, Mlp as Mlp
from dovetail.parts.ffn.moe import DenseAndExperts as DenseAndExperts, MoE as MoE
from dovetail.parts.ffn.router import SigmoidRouter as SigmoidRouter, SoftmaxRouter as SoftmaxRouter
from dovetail.parts.head import (
    Classifier as Classifier,
    Lm as Lm,
    MaskedLm as MaskedLm,
    PooledEmbedding as PooledEmbedding,
    Reward as Reward,
    TokenClassifier as TokenClassifier,
)
from dovetail.parts.init import FanIn as FanIn, Mup as Mup, Normal as Normal
from dovetail.parts.mask.distance import (
    BlockLocal as BlockLocal,
    Causal as Causal,
    GlobalTokens as GlobalTokens,
    Prefix as Prefix,
    Window as Window,
)
from dovetail.parts.mask.join import AllOf as AllOf, AnyOf as AnyOf, ByHead as ByHead, Full as Full
from dovetail.parts.mask.sparse import Dilated as Dilated, RandomBlocks as RandomBlocks, Strided as Strided
from dovetail.parts.mhc import Mhc as Mhc
from dovetail.parts.mixer.additive import (
    AdditiveAttention as AdditiveAttention,
    AdditiveCrossAttention as AdditiveCrossAttention,
    MultiplicativeAttention as MultiplicativeAttention,
    MultiplicativeCrossAttention as MultiplicativeCrossAttention,
)
from dovetail.parts.mixer.attention import Attention as Attention, CrossAttention as CrossAttention
from dovetail.parts.mixer.cells import Gru as Gru, Lstm as Lstm, Rnn as Rnn
from dovetail.parts.mixer.differential import DifferentialAttention as DifferentialAttention
from dovetail.parts.mixer.gated_deltanet import GatedDeltaNet as GatedDeltaNet
from dovetail.parts.mixer.gla import GLA as GLA
from dovetail.parts.mixer.linear_attention import LinearAttention as LinearAttention
from dovetail.parts.mixer.linformer import Linformer as Linformer
from dovetail.parts.mixer.mamba import Mamba as Mamba
from dovetail.parts.mixer.mamba2 import Mamba2 as Mamba2
from dovetail.parts.mixer.mla import MLA as MLA
from dovetail.parts.mixer.ngram import Ngram as Ngram
from dovetail.parts.mixer.nsa import NSA as NSA
from dovetail.parts.mixer.reverse import Reverse as Reverse
from dovetail.parts.mixer.rg_lru import RgLru as RgLru
from dovetail.parts.mixer.rwkv6 import Rwkv6 as Rwkv6
from dovetail.parts.mixer.s4 import S4 as S4
from dovetail.parts.mixer.short_conv import ShortConv as ShortConv
from dovetail.parts.mtp import Eagle as Eagle, Medusa as Medusa, MtpDepth as MtpDepth
from dovetail.parts.next_sentence import NextSentence as NextSentence
from dovetail.parts.norm import LayerNorm as LayerNorm, RMSNorm as RMSNorm
from dovetail.parts.ple import Ple as Ple, PleBlock as PleBlock
from dovetail.parts.position.absolute import Learned as Learned, NoPosition as NoPosition, Sinusoidal as Sinusoidal
from dovetail.parts.position.bias import Alibi as Alibi, T5Bias as T5Bias
from dovetail.parts.position.rope import Rope as Rope
from dovetail.parts.position.scaling import (
    DynamicNtk as DynamicNtk,
    LinearScaling as LinearScaling,
    Llama3 as Llama3,
    LongRope as LongRope,
    Ntk as Ntk,
    Proportional as Proportional,
    Yarn as Yarn,
)
from dovetail.parts.position.streaming import Streaming as Streaming
from dovetail.parts.wire import (
    Parallel as Parallel,
    PostNorm as PostNorm,
    ResPostNorm as ResPostNorm,
    SandwichNorm as SandwichNorm,
)

for offered in entry_points(group="dovetail.parts"):
    offered.load()
