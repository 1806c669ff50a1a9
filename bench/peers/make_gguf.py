"""A GGUF of a checkpoint of the Llama or Qwen2 family, and quantized ones. Runs in llama.cpp's environment.

    python make_gguf.py CHECKPOINT OUT.gguf [TYPE=OUT2.gguf ...]        TYPE: Q8_0, Q4_0, Q4_K_M

The tensors go over as they are stored (norms and biases as float32); the vocabulary is a list of numbers, for the
benchmark sends token ids.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import numpy as np

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """Raises KeyError for a tensor of another family."""
    if name in NAMES:
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    stem = rest if rest in LAYER else rest.rpartition(".")[0]
    return f"blk.{layer}.{LAYER[stem]}" + ("" if rest in LAYER else "." + rest.rpartition(".")[2])


def rotate_back(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection in the order that llama.cpp's rotation of adjacent pairs wants."""
    rows = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return rows.swapaxes(1, 2).reshape(values.shape)


def tensors(path: Path):
    """(name, bfloat16 values as uint16) of a safetensors file."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    data = np.memmap(path, np.uint8, "r", offset=8 + size)
    for name, entry in header.items():
        if name != "__metadata__":
            assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}"
            begin, end = entry["data_offsets"]
            yield name, data[begin:end].view(np.uint16).reshape(entry["shape"])


def write(checkpoint: Path, out: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    arch = {"llama": "llama", "qwen2": "qwen2"}[config["model_type"]]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    rope = config.get("rope_parameters") or config
    writer = gguf.GGUFWriter(str(out), arch)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"t{i}" for i in range(config["vocab_size"])])
    writer.add_token_types([gguf.TokenType.NORMAL] * config["vocab_size"])
    writer.add_token_merges(["t 0"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, values in tensors(checkpoint / "model.safetensors"):
        if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            values = rotate_back(values, heads if "q_proj" in name else kv_heads)
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name), (values.astype(np.uint32) << 16).view(np.float32))
        else:
            raw = np.ascontiguousarray(values).view(np.uint8)
            writer.add_tensor(gguf_name(name), raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(source: Path, kind: str, out: Path) -> None:
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    status = llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), params)
    if status:
        sys.exit(f"llama_model_quantize returned {status}")


if __name__ == "__main__":
    checkpoint, first, *rest = sys.argv[1:]
    if not Path(first).exists():
        write(Path(checkpoint), Path(first))
    for item in rest:
        kind, _, path = item.partition("=")
        if not Path(path).exists():
            quantize(Path(first), kind, Path(path))
