"""Any architecture through the library when the user says so; refusals have a reason. Those without a family of their
own are proven in test_transformers_conformance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from lmkit.api import CheckpointOptions, UnsupportedModel, WeightMismatch
from lmkit.checkpoint import open_checkpoint
from lmkit_model_transformers.arch import TransformersArchitecture
from lmkit_testing.checkpoints import COMMON, randomize
from lmkit_testing.model import deviation, load_tiny, prompt
from lmkit_testing.steps import ModelDriver

transformers = pytest.importorskip("transformers")
TARGET = "lmkit_model_transformers.arch:TransformersArchitecture"
LENGTH = 29
SMALL = {**COMMON, "vocab_size": 300}
# with what their configuration needs beside SMALL; all but one have a family of their own, which is not used here
MODELS: Mapping[str, Mapping[str, Any]] = {
    "Gemma2": {"sliding_window": 9},
    "GPTBigCode": {"n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 256},
    "Jais2": {},
    "Llama": {},
    "Mixtral": {"num_local_experts": 5},
    "ModernBertDecoder": {"local_attention": 14, "sep_token_id": 2, "cls_token_id": 1},
    "NanoChat": {},
    "VaultGemma": {"sliding_window": 11, "head_dim": 16},
}


def checkpoint(name: str, folder: Path, dtype: str = "float32") -> Path:
    if (folder / "config.json").exists():
        return folder
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **MODELS[name]})
    randomize(getattr(transformers, f"{name}ForCausalLM"), config, 0, dtype, 0.2).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def theirs(path: Path, ids: list[int], dtype: str = "float32") -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", MODELS)
def test_logits_whole_in_chunks_and_in_company(name: str, folder: Path) -> None:
    path = checkpoint(name, folder / name)
    loaded = load_tiny(path, TARGET, "float32")
    ids = prompt(300)
    want = theirs(path, ids)
    for chunk in (LENGTH, 7, 1):
        assert deviation(ModelDriver(loaded, "float32", seed=chunk).run(0, ids, chunk), want) < 1e-4
    others = [prompt(300, length, seed=length) for length in (5, 1, 17)]
    together = ModelDriver(loaded, "float32").step(list(enumerate([ids, *others])))
    assert deviation(together[0], want) < 1e-4
    assert loaded.weight_bytes == 4 * loaded.info.num_parameters


def test_a_composite_configuration(tmp_path: Path) -> None:
    """A language model whose fields stand in `text_config`."""
    text = {**SMALL, "model_type": "persimmon", "bos_token_id": 7, "eos_token_id": 9}
    config = transformers.FuyuConfig(text_config=text, hidden_size=64, patch_size=4)
    randomize(transformers.FuyuForCausalLM, config, 0, "bfloat16", 0.2).save_pretrained(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    for name in ("vocab_size", "dtype", "bos_token_id", "eos_token_id"):
        data.pop(name, None)
    data["text_config"]["dtype"] = "bfloat16"
    (tmp_path / "config.json").write_text(json.dumps(data))
    info = TransformersArchitecture().describe(data)
    assert (info.vocab_size, info.hidden_size, info.dtype) == (300, SMALL["hidden_size"], "bfloat16")
    assert (info.bos_token_id, info.eos_token_ids) == (7, (9,))
    assert info.max_length == text["max_position_embeddings"]
    ids = prompt(300)
    want = theirs(tmp_path, ids)
    assert deviation(ModelDriver(load_tiny(tmp_path, TARGET, "float32"), "float32").run(0, ids, 7), want) < 1e-4


@pytest.mark.parametrize("name", ["NanoChat", "VaultGemma", "Jais2"])
def test_bfloat16(name: str, folder: Path) -> None:
    path = checkpoint(name, folder / name)
    ids = prompt(300)
    want = theirs(path, ids)
    got = ModelDriver(load_tiny(path, TARGET, "bfloat16"), "bfloat16").run(0, ids, LENGTH)
    assert deviation(got, want) < 1.5 * deviation(theirs(path, ids, "bfloat16"), want) + 0.01


def test_windows_and_caps_are_found_by_asking(folder: Path) -> None:
    path = checkpoint("VaultGemma", folder / "VaultGemma")
    found = open_checkpoint(str(path), CheckpointOptions())
    assert found is not None
    info = TransformersArchitecture().describe(found.config)
    assert {layer.attn.window for layer in info.layers} == {None, 11}
    assert info.kv_specs(16, "float32")[1].window == 11


def test_a_mask_that_is_no_window_is_noticed() -> None:
    """Of whatever kind the mask is: the need says what a token sees, or the model is refused."""
    from lmkit.api import AttnNeed
    from lmkit_model_transformers.probe import _agrees
    from lmkit_model_transformers.routing import Mask
    from transformers import masking_utils as masks

    whole, window = AttnNeed(8, 1, 1), AttnNeed(8, 1, 1, window=7)
    causal, sliding = Mask(masks.causal_mask_function), Mask(masks.sliding_window_causal_mask_function(7))
    chunked = Mask(masks.chunked_causal_mask_function(8192, torch.zeros(1, dtype=torch.int64)))
    both = Mask(masks.bidirectional_mask_function)
    found = {(m, n): _agrees(m, n, 20000) for m in (causal, sliding, chunked, both) for n in (whole, window)}
    assert {pair for pair, agrees in found.items() if agrees} == {(causal, whole), (sliding, window)}


def test_a_tensor_too_few_is_named(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = checkpoint("Jais2", folder / "Jais2")
    tensors = load_file(path / "model.safetensors")
    victim = next(name for name in sorted(tensors) if ".layers.1." in name)
    del tensors[victim]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    with pytest.raises(WeightMismatch, match=victim):
        load_tiny(tmp_path, TARGET, "float32")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "a state of its own"),
        ({"architectures": ["BloomForCausalLM"], "model_type": "bloom"}, "attention interface"),
        ({"architectures": ["StrangeForCausalLM"]}, "no such language model"),
        ({"architectures": ["StrangeForCausalLM"], "auto_map": {"AutoModel": "x.Y"}}, "never run"),
        ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, "an encoder beside its decoder"),
        ({"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper"}, "an encoder beside"),
        ({"architectures": ["BartForConditionalGeneration"], "is_encoder_decoder": True}, "cross attention"),
        ({"architectures": ["Blip2ForConditionalGeneration"], "model_type": "blip-2"}, "no such language model"),
        ({"architectures": ["DogeForCausalLM"], "model_type": "doge", **SMALL}, "computes with its mask"),
        ({"architectures": ["BertLMHeadModel"], "model_type": "bert", **SMALL}, "set is_decoder"),
        ({"architectures": ["HrmTextForCausalLM"], "model_type": "hrm_text", **SMALL}, "shares"),
        ({"architectures": ["OPTForCausalLM"], "model_type": "opt"}, "does not run apart"),
        (
            {"architectures": ["BartForCausalLM"], "is_encoder_decoder": False, "decoder_layers": 1},
            "positions themselves",
        ),
        ({"architectures": ["PegasusForCausalLM"], "is_encoder_decoder": False, "decoder_layers": 1}, "positions them"),
        ({"architectures": ["MusicgenForCausalLM"], "num_hidden_layers": 1}, "positions themselves"),
        ({"architectures": ["GitForCausalLM"], "model_type": "git"}, "attention classes of its own"),
        ({"architectures": ["ZambaForCausalLM"], "model_type": "zamba"}, "a state of its own"),
        ({"architectures": ["InklingForCausalLM"], "model_type": "inkling_text"}, "does not run apart"),
        ({"architectures": ["MllamaForCausalLM"], "model_type": "mllama"}, "not kept apart"),
        ({"architectures": ["LlamaForCausalLM"], **SMALL, "num_attention_heads": "four"}, "configuration"),
        (
            {"architectures": ["LlamaForCausalLM"], **SMALL, "quantization_config": {"quant_method": "x"}},
            "plain weights",
        ),
    ],
)
def test_refusals_have_a_reason(config: dict, words: str) -> None:
    with pytest.raises(UnsupportedModel) as failure:
        TransformersArchitecture().describe(config)
    assert words in f"{failure.value.message} {failure.value.fix}"


def test_chosen_for_what_nobody_else_knows(folder: Path) -> None:
    """And for anything when the user says so; `native` never falls back."""
    from lmkit.api import SelectionError
    from lmkit.config import from_options
    from lmkit.plugins.resolve import resolve

    pytest.importorskip("lmkit_platform_cpu")
    path = checkpoint("ModernBertDecoder", folder / "ModernBertDecoder")

    def chosen(path: Path, **options: object) -> str:
        plan, _, _ = resolve(from_options({"model": str(path), "platform": "cpu", **options}))
        return plan.choice("model").name

    assert chosen(path) == "transformers"
    with pytest.raises(SelectionError, match="ModernBertDecoder"):
        chosen(path, model_impl="native")
    if find_spec("lmkit_model_llama"):
        llama = checkpoint("Llama", folder / "Llama")
        assert chosen(llama) == "LlamaForCausalLM"
        assert chosen(llama, model_impl="transformers") == "transformers"


def test_generates_as_the_library_does(folder: Path) -> None:
    """64 greedy tokens through a whole engine."""
    pytest.importorskip("lmkit_platform_cpu")
    from lmkit import LLM, SamplingParams
    from lmkit_testing.checkpoints import byte_tokenizer

    path = checkpoint("NanoChat", folder / "NanoChat")
    byte_tokenizer(path)
    ids = prompt(259)
    options = {"model_impl": "transformers", "dtype": "float32", "kv_memory": "8MiB", "max_step_tokens": 16}
    with LLM(str(path), **options) as llm:
        params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
        got = llm.generate([ids, ids[:9]], params)[0].token_ids
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    want = model.generate(torch.tensor([ids]), max_new_tokens=64, do_sample=False, eos_token_id=[])[0, len(ids) :]
    assert got == want.tolist()
