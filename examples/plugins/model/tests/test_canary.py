"""Compared with transformers' Llama: the kit makes tiny checkpoints of it, and here they get the names of a canary."""

import shutil

from lmkit_testing import ModelConformance, heads
from safetensors.torch import load_file, save_file

NAMES = (
    ("model.layers.", "blocks."), ("model.", ""), ("embed_tokens", "embed"), ("lm_head", "head"),
    ("input_layernorm", "norm_1"), ("post_attention_layernorm", "norm_2"), ("self_attn.o_proj", "attn.out"),
    ("self_attn.q_proj", "attn.qkv"), ("_proj", ""),
)  # fmt: skip


def as_canary(tensors):
    """The tensors of a Llama under the names of a canary."""
    import torch

    found = {}
    for name, tensor in tensors.items():
        if ".k_proj." in name or ".v_proj." in name:
            continue
        if ".q_proj." in name:
            tensor = torch.cat([tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"])
        for old, new in NAMES:
            name = name.replace(old, new)
        found[name] = tensor
    return found


class TestCanary(ModelConformance):
    plugin = "model:CanaryForCausalLM"
    family = "llama"
    variants = {"biases": {"attention_bias": True, "mlp_bias": True}, "tied": {"tie_word_embeddings": True}}
    published = heads(8, 2, 128)

    @classmethod
    def name_architecture(cls, directory):
        shutil.copytree(directory, directory / "transformers")  # what transformers reads
        super().name_architecture(directory)
        save_file(as_canary(load_file(directory / "model.safetensors")), directory / "model.safetensors")
