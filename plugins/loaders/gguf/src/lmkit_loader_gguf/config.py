"""A GGUF file as a checkpoint: its metadata as the configuration that its family reads here, its tensors by that name.

Torch-free. A key of the architecture that is not understood is refused: it would change the arithmetic unseen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from lmkit.api import Checkpoint, CheckpointError, UnsupportedModel

from lmkit_loader_gguf.families import FAMILIES
from lmkit_loader_gguf.family import KEYS, NAMES, Family
from lmkit_loader_gguf.file import GgufFile, TensorInfo, open_all
from lmkit_loader_gguf.special import READERS, SHARP
from lmkit_loader_gguf.vocabulary import end_tokens

PLAIN = ("F32", "F16", "BF16")
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
METHOD = "gguf"
EMBEDDING, HEAD = "token_embd", "output"
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# Keys of an architecture that say what is known otherwise, or nothing of how to run it.
IGNORED = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")
GATED = "ssm_norm"  # a norm that is not one of those whose weights are stored 1 greater
RAW = ("transposed",)  # layouts of linears whose rows are those of the model in the file
HEADS = "attention.head_count"
ROWS = ("values", "keys_values")  # layouts that move whole rows: blocks stay as they are
COLUMNS = ("value_columns",)  # that move columns of heads, of which blocks may be parts
NUMBER = re.compile("0|[1-9][0-9]{0,5}")
MAX_FACTORS, MAX_EXPERTS = 4096, 4096
GEMMA_2_27B, GEMMA_3_27B = 46, 62  # layers: these divide queries by the root of hidden size / heads


@dataclass(frozen=True, slots=True)
class Source:
    """Where one tensor of a checkpoint comes from: the rows from `first` to `last` of a tensor of a file."""

    name: str
    file: GgufFile
    tensor: TensorInfo
    expert: int | None = None  # of those stacked in the tensor
    heads: int = 0  # rows are permuted, as for pairs of neighbours, in each of so many heads
    less: float = 0.0  # what is taken off
    raw: bool = False  # blocks stay as they are
    layout: str = ""  # of `lmkit_loader_gguf.layouts`: how it is put back
    sizes: tuple[int, ...] = ()  # for that: `Family.sizes`
    rest: tuple[tuple[GgufFile, TensorInfo], ...] = ()  # for that: what belongs to it beside `tensor`


def open_gguf(ref: str) -> Checkpoint | None:
    """The checkpoint of a file, of the first of several, or of a folder with such. None: `ref` is something else.

    Raises CheckpointError, UnsupportedModel.
    """
    path = Path(ref).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        path = _only(path) or path
    if path.suffix.lower() != ".gguf":
        return None
    if not path.is_file():
        raise CheckpointError(f"no such file: {ref}", fix="check the path")
    files = open_all(path)
    sources = list(sources_of(files))
    return Checkpoint(
        ref=ref,
        path=path,
        format=METHOD,
        config=configuration(files, sources),
        files=tuple(file.path for file in files),
        nbytes=sum(tensor.nbytes for file in files for tensor in file.tensors.values()),
    )


def _only(folder: Path) -> Path | None:
    """The file, or the first of a split one, where a folder holds nothing else of that kind."""
    found = sorted(folder.glob("*.gguf"))
    if found and len(open_all(found[0])) != len(found):
        names = ", ".join(path.name for path in found[:4])
        raise CheckpointError(f"{folder} holds several checkpoints: {names}", fix="name the file")
    return found[0] if found else None


def family_of(metadata: Mapping[str, Any], path: Path) -> tuple[str, Family]:
    """Its name in the file, and what is known of it. Raises CheckpointError, UnsupportedModel."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError(f"{path}: general.architecture is missing", fix="convert it anew")
    if name == "llama" and metadata.get("llama.expert_count"):
        return name, FAMILIES["llama experts"]
    if name not in FAMILIES:
        known = ", ".join(sorted(each for each in FAMILIES if " " not in each))
        raise UnsupportedModel("general.architecture", name[:80], known)
    return name, FAMILIES[name]


def all_tensors(files: Sequence[GgufFile]) -> dict[str, tuple[GgufFile, TensorInfo]]:
    found: dict[str, tuple[GgufFile, TensorInfo]] = {}
    for file in files:
        for name, tensor in file.tensors.items():
            if name in found:
                raise CheckpointError(f"{name} is both in {found[name][0].path} and in {file.path}")
            found[name] = file, tensor
    return found


def sources_of(files: Sequence[GgufFile]) -> Iterator[Source]:
    """Every tensor by the name that its family gives it. A tensor without one keeps its own, and is extra."""
    metadata = files[0].metadata
    prefix, family = family_of(metadata, files[0].path)
    names = {**NAMES, **family.names}
    tensors = all_tensors(files)
    last = _number(metadata, f"{prefix}.block_count") - _number(metadata, f"{prefix}.nextn_predict_layers")
    for name, (file, tensor) in tensors.items():
        number, role, kind = _parsed(name)
        if name in FACTORS or role in family.partners.values() or number >= last > 0:  # those predict further tokens
            continue
        layer = f"{family.layers}.{number}." if number >= 0 else ""
        known = name
        if role in names:
            known = layer + (names[role][:-1] if names[role].endswith("=") else f"{names[role]}.{kind}")
        quantized = tensor.type.name not in PLAIN
        heads = _heads(metadata, prefix, role) if family.permuted else 0
        less = 1.0 if family.offset_norms and role.endswith("norm") and role != GATED and kind == "weight" else 0.0
        if "{e}" in known:
            if len(tensor.shape) < 2 or not 0 < tensor.shape[0] <= MAX_EXPERTS:
                raise CheckpointError(f"{file.path}: {name} has the shape {list(tensor.shape)}")
            for expert in range(tensor.shape[0]):
                yield Source(known.format(e=expert), file, tensor, expert, raw=quantized)
            continue
        if role in family.layouts:
            yield _rearranged(known, name, tensors, metadata, family)
            continue
        yield Source(known, file, tensor, None, heads, less, quantized and role != EMBEDDING)
        if role == EMBEDDING and quantized and f"{HEAD}.weight" not in tensors:
            # A head that is tied stays as it is stored; of the embedding only rows are looked up.
            yield Source(f"{names[HEAD]}.weight", file, tensor, raw=True)


def _rearranged(
    known: str,
    name: str,
    tensors: Mapping[str, tuple[GgufFile, TensorInfo]],
    metadata: Mapping[str, Any],
    family: Family,
) -> Source:
    """A tensor that the family stores in another layout. Blocks stay where whole ones move, or nothing does."""
    (file, tensor), (_, role, _) = tensors[name], _parsed(name)
    prefix, layout = metadata["general.architecture"], family.layouts[role]
    heads = _number(metadata, f"{prefix}.{HEADS}")
    sizes = tuple(_number(metadata, f"{prefix}.{key}") or heads for key in family.sizes)
    whole = layout in ROWS
    if layout in COLUMNS and sizes[1]:
        whole = tensor.shape[-1] // sizes[1] % tensor.type.elements == 0
    raw = tensor.type.name not in PLAIN and (layout in RAW or whole)
    rest: tuple[tuple[GgufFile, TensorInfo], ...] = ()
    if role in family.partners:
        partner = name.replace(role, family.partners[role])
        if partner not in tensors:
            raise CheckpointError(f"{file.path} has {name} without {partner}", fix="convert it anew")
        rest = (tensors[partner],)
    return Source(known, file, tensor, raw=raw, layout="" if raw and not whole else layout, sizes=sizes, rest=rest)


def _number(metadata: Mapping[str, Any], key: str) -> int:
    value = metadata.get(key, 0)
    return value if isinstance(value, int) else 0


def _parsed(name: str) -> tuple[int, str, str]:
    """Number of the layer, -1 for none; the tensor's role in it; "weight", "bias" or nothing."""
    role, _, kind = name.rpartition(".")
    role, kind = (role, kind) if kind in ("weight", "bias") else (name, "")
    block, _, rest = role.partition(".")
    number, _, inner = rest.partition(".")
    is_layer = block == "blk" and inner and NUMBER.fullmatch(number)
    return (int(number), inner, kind) if is_layer else (-1, role, kind)


def _heads(metadata: Mapping[str, Any], prefix: str, role: str) -> int:
    queries = metadata.get(f"{prefix}.attention.head_count", 0)
    found = {"attn_q": queries, "attn_k": metadata.get(f"{prefix}.attention.head_count_kv", queries)}.get(role, 0)
    return found if isinstance(found, int) else 0


def configuration(files: Sequence[GgufFile], sources: Sequence[Source]) -> dict[str, Any]:
    """As the family's config.json would have it. Raises CheckpointError, UnsupportedModel."""
    metadata, path = files[0].metadata, files[0].path
    prefix, family = family_of(metadata, path)
    given = {key.removeprefix(f"{prefix}."): v for key, v in metadata.items() if key.startswith(f"{prefix}.")}
    tensors = all_tensors(files)
    if f"{EMBEDDING}.weight" not in tensors:
        raise CheckpointError(f"{path} has no {EMBEDDING}.weight", fix="give a file of a whole language model")
    known = {**KEYS, **family.keys}
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": tensors[f"{EMBEDDING}.weight"][1].shape[0],
        **family.fixed,
    }
    for key, name in known.items():
        if key in given:
            config[name] = given.pop(key)
    names = {source.name for source in sources}
    config["tie_word_embeddings"] = f"{ ({**NAMES, **family.names}[HEAD]) }.weight" not in names
    config |= {key: f"blk.0.{role}.bias" in tensors for role, key in family.biased.items()}
    config |= {key: f"blk.0.{role}.weight" in tensors for role, key in family.weighted.items()}
    if "moe_intermediate_size" in config:
        config.setdefault("intermediate_size", config["moe_intermediate_size"])
    if prefix in READERS:
        READERS[prefix](config, given)
    if family.turned:
        _rotary(config, given, tensors, family)
    _special(prefix, config, given)
    stored = {source.tensor.type.name for source in sources if len(source.tensor.shape) > 1}
    config["dtype"] = "float32" if stored == {"F32"} else "float16" if stored <= {"F32", "F16"} else "bfloat16"
    if quantized := _types(sources, family):
        config["quantization_config"] = {"quant_method": METHOD, "tensors": quantized}
    for key in ("bos_token_id", "eos_token_id"):
        if isinstance(token := metadata.get(f"tokenizer.ggml.{key}"), int):
            config[key] = token
    config["eos_token_id"] = end_tokens(metadata) or config.get("eos_token_id")
    for key, value in given.items():
        if key not in IGNORED:
            known_keys = ", ".join(sorted(known))
            raise UnsupportedModel(f"{prefix}.{key[:80]}", repr(value)[:80], f"keys {known_keys}")
    return config


def _types(sources: Sequence[Source], family: Family) -> dict[str, str]:
    """Types of quantized modules, of each kind of expert in turn where one module has them all."""
    found = {source.name.removesuffix(".weight"): source.tensor.type.name for source in sources if source.raw}
    for source in sorted(sources, key=lambda source: source.tensor.name):  # gates before what they are multiplied with
        number, role, _ = _parsed(source.tensor.name)
        if source.raw and source.expert == 0 and role in family.stacks:
            module = f"{family.layers}.{number}.{family.stacks[role]}"
            found[module] = f"{found[module]},{source.tensor.type.name}" if module in found else source.tensor.type.name
    return found


def _rotary(config: dict[str, Any], given: dict[str, Any], tensors: Mapping[str, Any], family: Family) -> None:
    """Rotary parameters, taken out of `given`."""
    head = config.get("head_dim")
    if not isinstance(head, int):
        head = _integer(config, "hidden_size") // max(1, _integer(config, "num_attention_heads"))
    if (turned := given.pop("rope.dimension_count", head)) != head:
        if not family.partial or not isinstance(turned, int):
            raise UnsupportedModel("rope.dimension_count", turned, f"{head}: heads are turned as a whole")
        config["partial_rotary_factor"] = turned / head
    if (values := given.pop("attention.value_length", head)) != head:
        raise UnsupportedModel("attention.value_length", values, f"{head}, as attention.key_length")
    kind = given.pop("rope.scaling.type", "none")
    factor = given.pop("rope.scaling.factor", None)
    original = given.pop("rope.scaling.original_context_length", None)
    attention, sharp = given.pop("rope.scaling.attn_factor", None), config.pop(SHARP, 0.0)
    lists = [_factors(*tensors[name]) for name in FACTORS if name in tensors]
    if lists:
        if kind not in ("none", "longrope", "linear") or len(lists) > 2:
            raise UnsupportedModel("rope.scaling.type", kind, "none or longrope with factors for each pair")
        config["rope_scaling"] = {
            "rope_type": "longrope",
            "long_factor": lists[0],
            "short_factor": lists[-1],
            "original_max_position_embeddings": original or config.get("max_position_embeddings"),
            "attention_factor": 1.0 if attention is None else attention,
        }
    elif kind in ("linear", "yarn"):
        scaling = {"rope_type": kind, "factor": factor, "attention_factor": attention}
        scaling |= {"original_max_position_embeddings": original, **family.rope} if kind == "yarn" else {}
        scaling |= {"mscale": 10 * sharp, "mscale_all_dim": 10 * sharp} if sharp else {}
        config["rope_scaling"] = {key: value for key, value in scaling.items() if value is not None}
    elif kind != "none":
        raise UnsupportedModel("rope.scaling.type", kind, "none, linear, yarn, longrope")
    elif factor not in (None, 0.0, 1.0):
        raise UnsupportedModel("rope.scaling.factor", factor, "1, as there is no rope.scaling.type")


def _factors(file: GgufFile, tensor: TensorInfo) -> list[float]:
    if tensor.type.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > MAX_FACTORS:
        raise CheckpointError(f"{file.path}: {tensor.name} is {tensor.type.name} {list(tensor.shape)}, not F32 [pairs]")
    return [float(f) for f in np.frombuffer(file.data, "<f4", tensor.shape[0], tensor.offset)]


def _special(prefix: str, config: dict[str, Any], given: dict[str, Any]) -> None:
    """What the file format leaves to the program that runs the model."""
    if prefix in ("gemma2", "gemma3"):
        large = config.get("num_hidden_layers") == {"gemma2": GEMMA_2_27B, "gemma3": GEMMA_3_27B}[prefix]
        head = config.get("head_dim", 256)
        whole = _integer(config, "hidden_size") // max(1, _integer(config, "num_attention_heads"))
        config["query_pre_attn_scalar"] = whole if large else head
    if prefix in ("gemma3", "exaone4"):
        pattern = given.pop("attention.sliding_window_pattern", None)
        if isinstance(pattern, list):
            config["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]
        elif pattern is not None:
            config["sliding_window_pattern"] = pattern
    if prefix == "qwen2moe":
        config.setdefault("shared_expert_intermediate_size", config.get("intermediate_size"))


def _integer(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or not 0 < value < 1 << 31:
        raise UnsupportedModel(key, value, "a positive integer")
    return value
