"""What a model is, as data: made from a checkpoint's configuration by an Architecture, without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Literal

from lmkit.contracts.dtypes import itemsize, kv_scale_bytes
from lmkit.contracts.params import PoolingTask

if TYPE_CHECKING:
    import torch

NormKind = Literal["rms", "rms_offset", "rms_plain", "layer", "layer_offset", "layer_no_bias", "layer_plain"]
"""RMS norm, or layer norm. offset: the stored weight is 1 less than the one to use; plain: no weight (and bias)."""


HEAD = "lm_head"  # the name that models give to the linear that makes the logits


@dataclass(frozen=True, slots=True)
class AttnNeed:
    """Everything a group of equal attention layers asks of a backend."""

    head_dim: int
    num_q_heads: int
    num_kv_heads: int
    dtype: str = "auto"  # filled by the resolver
    kv_dtype: str = "auto"
    block_size: int = 0  # 0 until chosen
    v_head_dim: int | None = None  # None = head_dim
    window: int | None = None  # a token sees the `window` last positions, itself included; see `causal`
    chunked: bool = False  # a token sees back to the last multiple of `window` only, itself included
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    mla: bool = False  # values are the first v_head_dim entries of the keys, and not kept beside them
    causal: bool = True  # False: it also sees what follows; a window then reaches equally far on both sides
    alibi_scale: float = 1.0  # what the slopes of alibi are multiplied by
    tree: bool = False  # drafts may branch: see `TreeAttention`
    among: tuple[int, int] = (0, 0)  # of a rank: its first query head, and of how many; (0, 0): these are all

    @property
    def kv_width(self) -> int:
        """Numbers that a layer keeps of one token and KV head, beside scales."""
        return self.head_dim + (0 if self.mla else self.v_head_dim or self.head_dim)

    def kv_bytes(self, kv_dtype: str) -> int:
        """Bytes that a layer keeps of one token."""
        return self.num_kv_heads * (self.kv_width * itemsize(kv_dtype) + kv_scale_bytes(kv_dtype))

    @property
    def slopes(self) -> list[float]:
        """Alibi's, of each query head: geometric (arXiv:2108.12409); beyond a power of two every other of the next."""
        first, heads = self.among if self.among[1] else (0, self.num_q_heads)
        power = 1 << (heads.bit_length() - 1)
        found = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
        found += [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(heads - power)]
        return [slope * self.alibi_scale for slope in found[first : first + self.num_q_heads]]

    @property
    def features(self) -> frozenset[str]:
        """Feature names that a backend must declare (PLUGINS: what is not declared is refused)."""
        named = {
            "causal": self.causal,
            "bidirectional": not self.causal,
            "sliding_window": self.window is not None and self.causal and not self.chunked,
            "chunked": self.chunked and self.causal,
            "bidirectional_chunked": self.chunked and not self.causal,
            "bidirectional_window": self.window is not None and not self.causal,
            "softcap": self.softcap is not None,
            "sinks": self.sinks,
            "alibi": self.alibi and self.causal,
            "bidirectional_alibi": self.alibi and not self.causal,
            "mla": self.mla,
            "tree": self.tree,
            "tree_distances": self.tree and (self.window is not None or self.alibi),  # its places are not positions
        }
        return frozenset(name for name, on in named.items() if on)


@dataclass(frozen=True, slots=True)
class KVSpec:
    """One KV group: layers that share block tables. Answers how many bytes and which blocks are needed.

    A block of kind "recurrent" is the state of one row, after any number of tokens: `block_size` is the longest row's.
    """

    kind: Literal["full", "window", "recurrent", "cross"]
    layers: tuple[int, ...]
    block_size: int  # tokens per block
    num_kv_heads: int
    head_dim: int
    dtype: str
    bytes_per_block: int  # over all layers of the group, K and V (or state)
    window: int | None = None

    @property
    def recurrent(self) -> bool:
        return self.kind == "recurrent"

    @property
    def bytes_per_token(self) -> int:
        """By which a row's share of the cache grows with each token."""
        return 0 if self.recurrent else self.bytes_per_block // self.block_size


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of recurrent state that a layer keeps for each row."""

    name: str  # "conv", "ssm"
    shape: tuple[int, ...]  # of one row
    dtype: str = "float32"

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class LayerInfo:
    """One decoder layer as seen from outside: what it keeps of the tokens before, which may be nothing.

    Layers with equal attention needs form a KV group; those with recurrent state form one more, the last.
    """

    index: int
    attn: AttnNeed | None = None
    state: tuple[StateTensor, ...] = ()
    kv_of: int | None = None  # an earlier layer of equal needs, whose keys and values it reads: it writes none


@dataclass(frozen=True, slots=True)
class DenseInfo:
    """A linear module after pooling, stored in a folder of its own beside the checkpoint."""

    path: str
    in_features: int
    out_features: int
    bias: bool = True
    activation: Literal["none", "tanh", "relu", "gelu", "silu"] = "none"


# The first hidden state, the last one, their mean, the mean weighted by position, their sum over the root of their
# number, the largest values.
Reduction = Literal["cls", "last", "mean", "weighted_mean", "mean_sqrt", "max"]


@dataclass(frozen=True, slots=True)
class PoolerInfo:
    """How a pooling model turns hidden states into vectors: reduce, Model.logits as the head, dense modules, scale.

    Set by Architecture.describe; the resolver completes it with what the checkpoint's sentence-transformers files say.
    """

    task: PoolingTask
    size: int  # of one vector
    reduce: Literal["cls", "last", "mean", "max"] = "last"  # hidden states of the prompt to one; not for token tasks
    normalize: bool = False  # embeddings are scaled to length 1
    activation: Literal["none", "softmax", "sigmoid"] = "none"  # of classification scores
    labels: tuple[str, ...] = ()  # of classes
    dense: tuple[DenseInfo, ...] = ()
    joined: tuple[Reduction, ...] = ()  # in place of `reduce`: ways of which each makes a part of the vector
    prompt: str = ""  # what stands before each text of which a vector is asked

    @property
    def reductions(self) -> tuple[Reduction, ...]:
        """How hidden states become one, for each part of the vector."""
        return self.joined or (self.reduce,)

    @property
    def tasks(self) -> tuple[PoolingTask, ...]:
        """The tasks that can be asked for. An embedding model also embeds tokens, each by its hidden state."""
        return ("embed", "token_embed") if self.task == "embed" and len(self.joined) < 2 else (self.task,)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Set by Architecture.describe; read by the resolver, memory planning, loading and intake."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerInfo, ...]
    max_length: int  # positions that are served: those the model was made for, unless `length_note` says why not
    dtype: str  # of the checkpoint: "bfloat16", ...
    num_parameters: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    tie_embeddings: bool = False
    intermediate_size: int = 0  # widest activation, for the memory estimate
    linears: tuple[LinearSpec, ...] = ()  # every quantizable linear, in order
    adapter_targets: tuple[str, ...] = ()
    turned_experts: bool = False  # PEFT takes the outputs of stacked experts for inputs: A has them, B the inputs
    embedding: str = ""  # checkpoint module of the token embedding, module "embed" of the model; "": adapters keep off
    pooler: PoolerInfo | None = None  # None: it generates
    config: Mapping[str, object] = field(default_factory=dict)  # architecture's own validated values, for build()
    length_note: str = ""  # why `max_length` is less than the positions the model was made for; "": it is not

    @property
    def causal(self) -> bool:
        """Whether no token sees what follows it. Otherwise a prompt is computed in one step and nothing is cached."""
        return all(need.causal for need, _ in self.kv_groups())

    @property
    def recurrent(self) -> tuple[int, ...]:
        """Layers that keep recurrent state: it cannot be taken back to an earlier token."""
        return tuple(layer.index for layer in self.layers if layer.state)

    def kv_groups(self) -> list[tuple[AttnNeed, tuple[int, ...]]]:
        """Layers grouped by equal attention need, full attention first, in order of their first layer.

        Those that read the keys and values of another layer are not among them.
        """
        groups: dict[AttnNeed, list[int]] = {}
        for layer in self.layers:
            if layer.attn is not None and layer.kv_of is None:
                groups.setdefault(layer.attn, []).append(layer.index)
        ordered = sorted(groups.items(), key=lambda kv: (kv[0].window is not None, kv[1][0]))
        return [(need, tuple(layers)) for need, layers in ordered]

    def kv_specs(self, block_size: int, kv_dtype: str) -> list[KVSpec]:
        """One KVSpec per group of attention layers, then one for all recurrent state."""
        specs = []
        for need, layers in self.kv_groups():
            heads, size = (need.num_kv_heads, need.head_dim), need.kv_bytes(kv_dtype) * block_size * len(layers)
            kind: Literal["full", "window"] = "full" if need.window is None else "window"
            specs.append(KVSpec(kind, layers, block_size, *heads, kv_dtype, size, need.window))
        if self.recurrent:
            size = sum(t.nbytes for layer in self.layers for t in layer.state)
            specs.append(KVSpec("recurrent", self.recurrent, self.max_length, 0, 0, "", size))
        return specs


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """One linear of a model as it is built: possibly several checkpoint linears merged along the output axis."""

    name: str  # module path in the model: "layers.0.attn.qkv"
    in_features: int
    out_features: tuple[int, ...]  # one per merged part, in order
    bias: bool = False
    shard: Literal["column", "row", "none"] = "none"  # tensor-parallel axis
    parts: tuple[str, ...] = ()  # names of the merged parts ("q", "k", "v"); () when not merged
    sources: tuple[str, ...] = ()  # checkpoint module names, for a scheme's ignore lists
    experts: int = 0  # > 0: the linears of so many experts, one after another along the output axis
    dense: bool = False  # the model reads its weight [out, in]: in the model's dtype, whatever it is stored as

    @property
    def total_out(self) -> int:
        return sum(self.out_features)

    @property
    def is_head(self) -> bool:
        """Whether it makes the logits: errors there are not averaged away by the layers that follow."""
        return self.name == HEAD


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """How one stored tensor of a (quantized) linear is created. `shape` is that of the merged linear."""

    shape: tuple[int, ...]
    dtype: str
    part_axis: int | None = 0  # axis along which merged parts are concatenated; None: one value per part or shared
    part_sizes: tuple[int, ...] = ()  # size of each part along part_axis; () = LinearSpec.out_features
    optional: bool = False
    fill: float | None = None  # value when optional and absent


@dataclass(frozen=True, slots=True)
class WeightRule:
    """Where a checkpoint tensor goes. "{i}" is any layer number, "{p}" the tensor's own name (weight, bias, scale)."""

    source: str  # "model.layers.{i}.self_attn.q_proj.{p}"
    target: str  # "layers.{i}.attn.qkv.{p}"
    part: str | int | None = None  # "q"; "{e}.up", with a number of the source; "*", "*.up": all (such) parts, in order
    transform: Callable[[torch.Tensor], torch.Tensor] | None = None
    optional: bool = False  # may be absent (tied embeddings)
    ignore: bool = False  # present in some checkpoints, not needed (rotary caches)
