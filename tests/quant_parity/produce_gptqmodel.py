"""Checkpoints quantized by GPTQModel: `python produce_gptqmodel.py FOLDER [NAME ...]`, in an environment that has it.

Each is a tiny Llama with what its producer makes of it: `expected.safetensors` holds token ids and the logits of
transformers over the weights that the producer's own dequantization gives. Both are float32.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")

import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 64
GPTQ = {
    "gptq4": {"bits": 4, "group_size": 32},
    "gptq4_act_order": {"bits": 4, "group_size": 32, "desc_act": True, "act_group_aware": False},
    "gptq4_zeros": {"bits": 4, "group_size": 32, "sym": False},
    "gptq4_v2": {"bits": 4, "group_size": 64, "sym": False, "format": "gptq_v2"},
    "gptq8_rows": {"bits": 8, "group_size": -1, "act_group_aware": False},
    "gptq3": {"bits": 3, "group_size": 32},
    "gptq2": {"bits": 2, "group_size": 32, "sym": False},
    "gptq_dynamic": {
        "bits": 4, "group_size": 32,
        "dynamic": {r"-:.*\.0\.self_attn\.o_proj": {}, r"+:.*\.mlp\.down_proj": {"bits": 8, "group_size": 32}},
    },
}  # fmt: skip
AWQ = {
    "awq": {"bits": 4, "group_size": 32, "quant_method": "awq", "format": "gemm", "sym": False},
    "awq_symmetric": {"bits": 4, "group_size": 64, "quant_method": "awq", "format": "gemm", "sym": True},
}


def plain(folder: Path) -> Path:
    """The model that is quantized."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    named = {"unk_token": "w0", "bos_token": "w1", "eos_token": "w2", "pad_token": "w0"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)
    return folder


def expected(folder: Path, source: Path, backend: BACKEND) -> dict[str, torch.Tensor]:
    """Logits by the producer's own weights."""
    reference = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    quantized = GPTQModel.load(str(folder), backend=backend, device="cpu", dtype=torch.float16)
    left = quantized.model.state_dict()  # a quantizer may move scales into what it leaves as it is
    reference.load_state_dict({k: v.float() for k, v in left.items() if k in reference.state_dict()}, strict=False)
    for name, module in quantized.model.named_modules():
        if hasattr(module, "qweight"):
            linear = reference.get_submodule(name)
            bare = hasattr(module, "dequantize_weight")
            weight = module.dequantize_weight() if bare else module(torch.eye(linear.in_features, dtype=torch.float16))
            linear.weight.data = weight.detach().float().T.contiguous()
    tokens = torch.tensor([[(7 * i + 3) % VOCABULARY for i in range(40)]])
    with torch.no_grad():
        return {"tokens": tokens, "logits": reference(tokens).logits[0].contiguous()}


def main(target: Path, names: list[str]) -> None:
    source = plain(target / "plain")
    noise = random.Random(0)
    samples = [[noise.randrange(3, VOCABULARY) for _ in range(64)] for _ in range(16)]
    calibration = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in samples]
    for name, settings in (GPTQ | AWQ).items():
        if names and name not in names:
            continue
        backend = BACKEND.AWQ_TORCH if name in AWQ else BACKEND.GPTQ_TORCH
        model = GPTQModel.load(str(source), QuantizeConfig(**settings), device="cpu")
        model.quantize(calibration, batch_size=4, backend=backend)
        model.save(str(target / name))
        save_file(expected(target / name, source, backend), target / name / "expected.safetensors")
        print("made", name, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
