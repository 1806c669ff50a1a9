"""Checkpoints quantized by AutoRound: `python produce_autoround.py FOLDER [NAME ...]`, in an environment that has it.

Each is a tiny Llama with what its producer makes of it: `expected.safetensors` holds token ids and the logits of
transformers over the weights that the producer's own dequantization gives. Both are float32.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from auto_round import AutoRound
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 64
FORMS = {
    "int4": ({"bits": 4, "group_size": 32, "sym": True}, "auto_round"),
    "int4_zeros": ({"bits": 4, "group_size": 32, "sym": False}, "auto_round:auto_gptq"),
    "int4_awq": ({"bits": 4, "group_size": 32, "sym": False}, "auto_round:auto_awq"),
    "int8_rows": ({"bits": 8, "group_size": -1, "sym": True}, "auto_round"),
    "int2_zeros": ({"bits": 2, "group_size": 32, "sym": False}, "auto_round"),
    "mixed": (
        {
            "bits": 4, "group_size": 32, "sym": True,
            "layer_config": {
                "model.layers.0.mlp.down_proj": {"bits": 8, "group_size": 64},
                "model.layers.0.self_attn.o_proj": {"bits": 16},
            },
        },
        "auto_round",
    ),
}  # fmt: skip


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


def expected(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Logits by the weights that the producer has rounded, before it stores them."""
    tokens = torch.tensor([[(7 * i + 3) % VOCABULARY for i in range(40)]])
    with torch.no_grad():
        return {"tokens": tokens, "logits": model(tokens).logits[0].float().contiguous()}


def main(target: Path, names: list[str]) -> None:
    source = plain(target / "plain")
    for name, (settings, form) in FORMS.items():
        if names and name not in names:
            continue
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        given = {"iters": 0, "disable_opt_rtn": True, "amp": False, "device_map": "cpu", **settings}
        tokenizer, work = AutoTokenizer.from_pretrained(source), target / f"{name}.work"
        rounded, _ = AutoRound(model, tokenizer, **given).quantize()
        logits = expected(rounded)
        again = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)  # rounding is the same every time
        AutoRound(again, tokenizer, **given).quantize_and_save(str(work), format=form)
        made = next(path.parent for path in sorted(work.rglob("config.json")))
        folder = target / name
        folder.mkdir(exist_ok=True)
        for file in ("config.json", "model.safetensors"):
            shutil.copyfile(made / file, folder / file)
        save_file(logits, folder / "expected.safetensors")
        shutil.rmtree(work)
    shutil.rmtree(source)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
