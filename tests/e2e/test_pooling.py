"""Pooling models end to end: vectors equal to sentence-transformers and transformers, whatever the steps look like."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from lmkit import LLM, PoolingParams
from lmkit.api import ConfigError, InvalidParam, RequestTooLarge, UnsupportedModel, UnsupportedTask
from lmkit_testing.checkpoints import byte_tokenizer, tiny_checkpoint
from lmkit_testing.pooling import expected, pooling_checkpoint
from lmkit_testing.published import minilm

TEXTS = [
    "Hello world",
    "The cat sat on the mat, and then slept for hours in the warm afternoon sun.",
    "A feline rested on a rug",
    "Stock markets fell sharply after the announcement",
    "Share prices dropped when the news came out",
    "x",
]
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}


def start(path: Path | str, **options: object) -> LLM:
    return LLM(str(path), **{"dtype": "float32", "kv_memory": "8MiB", **options})


def modules(path: Path, *listed: tuple[str, str, dict]) -> Path:
    """Writes modules.json and the folders of `listed` = (type, folder, config)."""
    entries = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for i, (kind, folder, config) in enumerate(listed, 1):
        if kind == "Pooling" and not {"embedding_dimension", "word_embedding_dimension"} & config.keys():
            config = {**config, "embedding_dimension": 48}
        (path / folder).mkdir(exist_ok=True)
        (path / folder / "config.json").write_text(json.dumps(config))
        entries.append({"idx": i, "name": str(i), "path": folder, "type": f"sentence_transformers.models.{kind}"})
    (path / "modules.json").write_text(json.dumps(entries))
    return path


# ------------------------------------------------------------------------------------------- a published model


@pytest.fixture(scope="module")
def published():
    path = minilm()
    with start(path, kv_memory="auto") as llm:
        yield llm, path


def test_equal_to_transformers(published) -> None:
    """The mean over the tokens, scaled: what modules.json of this model says."""
    llm, path = published
    transformers = pytest.importorskip("transformers")
    model = transformers.BertModel.from_pretrained(path).eval()
    for text, ours in zip(TEXTS, llm.embed(TEXTS), strict=True):
        with torch.no_grad():
            hidden = model(torch.tensor([llm.text.encode_prompt(text)])).last_hidden_state[0]
        theirs = torch.nn.functional.normalize(hidden.mean(0), dim=0)
        assert np.allclose(ours.data, theirs, atol=1e-5)


@pytest.mark.full("lmkit-model-bert")  # eight seconds to import
def test_equal_to_sentence_transformers(published) -> None:
    llm, path = published
    sentence_transformers = pytest.importorskip("sentence_transformers")
    theirs = sentence_transformers.SentenceTransformer(str(path), device="cpu").encode(TEXTS)
    ours = np.stack([o.data for o in llm.embed(TEXTS)])
    assert abs(ours - theirs).max() < 1e-5
    order = [np.argsort(-(m @ m.T), axis=1).tolist() for m in (ours, theirs)]
    assert order[0] == order[1]


def test_longest_text_and_what_is_longer(published) -> None:
    """The checkpoint's own length, not that of its positions."""
    llm, _ = published
    assert llm.facts.max_length == 256
    fits = llm.embed("x " * 254)[0]
    assert len(fits.prompt_token_ids) == 256
    with pytest.raises(RequestTooLarge, match=r"256 tokens.*257 tokens"):
        llm.embed("x " * 255)
    cut = llm.embed("x " * 300, truncate=256)[0]
    assert np.allclose(cut.data, fits.data, atol=1e-6)


def test_score_is_the_cosine(published) -> None:
    llm, _ = published
    query, *documents = TEXTS[1:5]
    scores = llm.score(query, documents)
    vectors = np.stack([o.data for o in llm.embed([query, *documents])])
    assert np.allclose(scores, vectors[1:] @ vectors[0], atol=1e-6)
    assert scores[0] == max(scores)


def test_dimensions_cut_and_scale(published) -> None:
    llm, _ = published
    (whole,), (cut,) = llm.embed("Hello"), llm.embed("Hello", dimensions=64)
    assert np.allclose(cut.data, whole.data[:64] / np.linalg.norm(whole.data[:64]), atol=1e-6)
    with pytest.raises(InvalidParam, match="384"):
        llm.embed("Hello", dimensions=385)


def test_what_it_cannot_do_is_refused(published) -> None:
    llm, path = published
    for call in (lambda: llm.generate("Hello"), lambda: llm.classify("Hello"), lambda: llm.reward("Hello")):
        with pytest.raises(UnsupportedTask, match="embed"):
            call()
    with pytest.raises(ConfigError, match="--task classify"):
        start(path, task="classify")


def test_many_texts_in_any_company(published) -> None:
    """A batch over many steps gives what each text gives alone."""
    llm, _ = published
    many = [f"{'word ' * (i % 40)}number {i}" for i in range(150)]
    together = llm.embed(many)
    for i in (0, 39, 77, 149):
        assert np.allclose(together[i].data, llm.embed(many[i])[0].data, atol=1e-6)


# ---------------------------------------------------------------------------------------------- cross-encoders


def test_a_pair_is_read_with_token_types(tmp_path: Path) -> None:
    values = {"num_labels": 1, "vocab_size": 400}
    path = pooling_checkpoint("BertConfig", "BertForSequenceClassification", tmp_path, **values)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    tokenizer["post_processor"] = {
        "type": "BertProcessing", "sep": ["<|im_end|>", 2], "cls": ["<|im_start|>", 1],
    }  # fmt: skip
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with start(path) as llm:
        ids, second = llm.text.encode_pair("query", "a document")
        assert ids[second - 1] == 2
        raw = llm.score("query", ["a document", "other"], activation=False)
        shown = llm.score("query", ["a document", "other"])
    types = torch.tensor([[int(i >= second) for i in range(len(ids))]])
    want = float(expected(path, "BertForSequenceClassification", ids, token_type_ids=types)[0])
    assert raw[0] == pytest.approx(want, abs=1e-5)
    assert shown[0] == pytest.approx(1 / (1 + np.exp(-want)), abs=1e-5)
    assert raw[0] != raw[1]


def test_late_interaction(tmp_path: Path) -> None:
    """ColBERT: the sum over the query's tokens of the best match among the document's."""
    path = pooling_checkpoint("BertConfig", "BertModel", tmp_path)
    from safetensors.torch import load_file, save_file

    tensors = {f"bert.{k}": v for k, v in load_file(path / "model.safetensors").items()}
    linear = torch.randn(16, 48, generator=torch.Generator().manual_seed(0))
    save_file({**tensors, "linear.weight": linear}, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"], "dim": 16}))
    with start(path) as llm:
        q, d = (o.data for o in llm.encode(["query", "a document"]))
        (score,) = llm.score("query", "a document")
        hidden = expected_hidden(path, tensors, llm.text.encode_prompt("query"))
    want = torch.nn.functional.normalize(hidden @ linear.T, dim=-1)
    assert q.shape == want.shape
    assert np.allclose(q, want, atol=1e-5)
    assert score == pytest.approx(float((q @ d.T).max(axis=1).sum()), abs=1e-5)


def expected_hidden(path: Path, tensors: dict, ids: list[int]) -> torch.Tensor:
    transformers = pytest.importorskip("transformers")
    model = transformers.BertModel(transformers.BertConfig.from_pretrained(path)).eval()
    model.load_state_dict({k.removeprefix("bert."): v for k, v in tensors.items()})
    with torch.no_grad():
        return model(torch.tensor([ids])).last_hidden_state[0]


# ----------------------------------------------------------------------------------------- decoders as encoders


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("config", "model", "values"),
    [
        ("Qwen3Config", "Qwen3Model", {"head_dim": 16, "num_key_value_heads": 2}),
        ("MistralConfig", "MistralModel", {"num_key_value_heads": 2, "sliding_window": 9}),
        ("LlamaConfig", "LlamaForSequenceClassification", {"num_key_value_heads": 2, "num_labels": 3}),
        ("Qwen2Config", "Qwen2ForSequenceClassification", {"num_key_value_heads": 2, "num_labels": 1}),
        ("Qwen2Config", "Qwen2ForTokenClassification", {"num_key_value_heads": 2, "num_labels": 2}),
    ],
)
def test_decoders_with_another_head(tmp_path: Path, config: str, model: str, values: dict) -> None:
    """Last-token vectors, classes and scores of tokens; chunks and the prefix cache change nothing."""
    path = pooling_checkpoint(config, model, tmp_path, **SPECIAL, **values)
    ids = list(range(10, 63))
    want = expected(path, model, ids).numpy()
    with start(path, max_step_tokens=16) as llm:
        task = llm.facts.pooler.task
        raw = [llm.encode(ids, PoolingParams(task, activation=False))[0].data for _ in range(2)]
        stats = llm._engine.core.stats()
        ready = llm.encode(ids)[0].data
    want = want[-1] if task == "embed" else want
    for got in raw:
        assert got == pytest.approx(want, abs=1e-4 * max(1.0, float(abs(want).max())))
    assert (stats.num_cached_tokens > 0) == (task in ("embed", "classify"))
    if task == "embed":
        assert ready == pytest.approx(want / np.linalg.norm(want), abs=1e-5)
    if task == "classify":
        assert ready.sum() == pytest.approx(1.0) if len(ready) > 1 else 0 < ready[0] < 1


def test_modules_make_an_embedding_model_of_a_generator(tmp_path: Path) -> None:
    """Mean pooling over several steps, a dense module, and no scaling: as modules.json says."""
    from safetensors.torch import save_file

    path = tiny_checkpoint("qwen3", tmp_path, vocab_size=300)
    byte_tokenizer(path)
    dense = {
        "in_features": 48,
        "out_features": 8,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    modules(path, ("Pooling", "1_Pooling", {"pooling_mode": "mean"}), ("Dense", "2_Dense", dense))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "linear.weight": torch.randn(8, 48, generator=generator), "linear.bias": torch.randn(8, generator=generator),
    }  # fmt: skip
    save_file(tensors, path / "2_Dense" / "model.safetensors")
    ids = list(range(10, 63))
    with start(path, max_step_tokens=7) as llm:
        got = [llm.embed([ids])[0].data for _ in range(2)]
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        hidden = model(torch.tensor([ids])).last_hidden_state[0].mean(0)
    want = torch.tanh(tensors["linear.weight"] @ hidden + tensors["linear.bias"]).numpy()
    for vector in got:
        assert vector == pytest.approx(want, abs=1e-5)
    with start(path, task="generate") as llm:
        assert len(llm.generate([ids])[0].token_ids) > 0
        with pytest.raises(UnsupportedTask, match="generate"):
            llm.embed("Hello")


@pytest.mark.parametrize(
    ("kind", "config", "words"),
    [
        ("Pooling", {"pooling_mode": "median"}, "median"),
        ("Pooling", {"pooling_mode": ["mean", 3]}, "pooling_mode"),
        ("Pooling", {"pooling_mode": {"mean": 1}}, "pooling_mode"),
        ("Pooling", {"word_embedding_dimension": 47}, "embedding_dimension"),
        ("Pooling", {"pooling_of_next_year": True}, "pooling_of_next_year"),
        ("LayerNorm", {"dimension": 48}, "LayerNorm"),
        ("Dense", {"in_features": 48, "out_features": 48, "use_residual": True}, "use_residual"),
        ("Dense", {"in_features": 48, "out_features": 8, "module_input_name": "other"}, "module_input_name"),
        ("Normalize", {"module_output_name": "other"}, "module_output_name"),
        ("WordWeights", {}, "WordWeights"),
        ("Dense", {"in_features": 5, "out_features": 8}, "in_features"),
        ("Dense", {"in_features": 48, "out_features": 8, "activation_function": "my.code.Act"}, "Act"),
    ],
)
def test_modules_that_are_not_understood(tmp_path: Path, kind: str, config: dict, words: str) -> None:
    path = tiny_checkpoint("qwen3", tmp_path, vocab_size=300)
    byte_tokenizer(path)
    modules(path, (kind, "1_Module", config))
    with pytest.raises(UnsupportedModel, match=words):
        start(path)


# ---------------------------------------------------------------------------------- as sentence-transformers reads it

PARTS: dict[str, list[tuple[str, str, dict]]] = {
    "joined": [("Pooling", "1_Pooling", {"pooling_mode": ["cls", "mean"]})],
    "joined, by older keys": [
        (
            "Pooling", "1_Pooling",
            {
                "word_embedding_dimension": 48, "pooling_mode_lasttoken": True, "pooling_mode_max_tokens": True,
                "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False,
            },
        )
    ],
    "none of the older keys": [("Pooling", "1_Pooling", {"pooling_mode_cls_token": False})],
    "newer keys beside older ones": [
        ("Pooling", "1_Pooling", {"pooling_mode": "max", "pooling_mode_cls_token": True}),
    ],
    "weighted": [("Pooling", "1_Pooling", {"pooling_mode": "weightedmean"}), ("Normalize", "2_Normalize", {})],
    "all": [
        (
            "Pooling", "1_Pooling",
            {"pooling_mode": ["weightedmean", "lasttoken", "mean_sqrt_len_tokens", "max", "mean", "cls"]},
        ),
        ("Dropout", "2_Dropout", {"dropout": 0.5}),
        ("Dense", "3_Dense", {"in_features": 288, "out_features": 16}),
        ("Normalize", "4_Normalize", {}),
    ],
    "dense without bias": [
        ("Pooling", "1_Pooling", {"pooling_mode": "mean", "include_prompt": False}),
        ("Dense", "2_Dense", {"in_features": 48, "out_features": 16, "bias": False}),
        (
            "Dense", "3_Dense",
            {"in_features": 16, "out_features": 8, "activation_function": "torch.nn.modules.linear.Identity"},
        ),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BERT whose tokenizer tells cases apart."""
    path = pooling_checkpoint("BertConfig", "BertModel", tmp_path_factory.mktemp("encoder"))
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<|im_end|>", "model_max_length": 100}
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return path


def of_library(path: Path, texts: list[str]) -> np.ndarray:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    return sentence_transformers.SentenceTransformer(str(path), device="cpu").encode(texts)


@pytest.mark.full("lmkit-core", "lmkit-worker")
@pytest.mark.filterwarnings("ignore")  # of the library, about older keys
@pytest.mark.parametrize("parts", PARTS)
def test_modules_do_what_they_do_in_the_library(parts: str, encoder: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = Path(shutil.copytree(encoder, tmp_path / "model"))
    modules(path, *PARTS[parts])
    generator = torch.Generator().manual_seed(0)
    for kind, folder, config in PARTS[parts]:
        if kind == "Dense":
            shape = config["out_features"], config["in_features"]
            tensors = {"linear.weight": torch.randn(shape, generator=generator) / 5}
            if config.get("bias", True):
                tensors["linear.bias"] = torch.randn(shape[0], generator=generator)
            save_file(tensors, path / folder / "model.safetensors")
    expected = of_library(path, TEXTS)
    with start(path) as llm:
        ours = np.stack([output.data for output in llm.embed(TEXTS)])
        assert llm.facts.pooler.size == expected.shape[1]
    assert ours == pytest.approx(expected, abs=2e-5 * float(abs(expected).max()))


@pytest.mark.full("lmkit-core", "lmkit-tokenizer-json")
@pytest.mark.parametrize("name", ["sentence_bert_config.json", "sentence_roberta_config.json"])
@pytest.mark.parametrize("prompt", [None, "query"])
def test_lower_case_and_prompts_are_those_of_the_library(
    name: str, prompt: str | None, encoder: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(encoder, tmp_path / "model"))
    modules(path, ("Pooling", "1_Pooling", {"pooling_mode": "mean"}))
    texts = ["The Capital of FRANCE", "ÄÖÜ \u0130stanbul \u03a3\u03a3", "<|im_start|> Marked", "x"]
    plain = of_library(path, texts)
    (path / name).write_text(json.dumps({"max_seq_length": 80, "do_lower_case": True}))
    prompts = {"prompts": {"query": "Find This: ", "document": ""}, "default_prompt_name": prompt}
    (path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    expected = of_library(path, texts)
    assert abs(expected - plain).max() > 1e-3
    with start(path) as llm:
        ours = np.stack([output.data for output in llm.embed(texts)])
        assert llm.facts.max_length == 80
    assert ours == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("sentence_bert_config.json", {"do_lower_case": "yes"}),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}),
        ("sentence_bert_config.json", {"module_output_name": "sentence_embedding"}),
        ("sentence_bert_config.json", {"modality_config": {"text": {"method": "forward", "method_output_name": "x"}}}),
        ("sentence_bert_config.json", {"query_length": 32}),
        ("sentence_bert_config.json", {"config_kwargs": {"hidden_act": "relu"}}),
        ("sentence_bert_config.json", {"tokenizer_name_or_path": "elsewhere"}),
        ("sentence_bert_config.json", {"key_of_next_year": 1}),
        ("config_sentence_transformers.json", {"truncate_dim": 8}),
        ("config_sentence_transformers.json", {"default_prompt_name": "missing", "prompts": {"query": ""}}),
        ("config_sentence_transformers.json", {"key_of_next_year": 1}),
    ],
)
def test_keys_that_change_vectors_and_are_not_understood(file: str, said: dict, encoder: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(encoder, tmp_path / "model"))
    modules(path, ("Pooling", "1_Pooling", {"pooling_mode": "mean"}))
    (path / file).write_text(json.dumps(said))
    with pytest.raises(UnsupportedModel, match=next(iter(said))):
        start(path)


def test_modules_of_other_code_and_in_another_order_are_refused(encoder: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(encoder, tmp_path / "model"))
    dense = ("Dense", "3_Dense", {"in_features": 48, "out_features": 8})
    modules(path, ("Pooling", "1_Pooling", {}), ("Normalize", "2_Normalize", {}), dense)
    with pytest.raises(UnsupportedModel, match="Dense behind Normalize"):
        start(path)
    listed = json.loads((path / "modules.json").read_text())[:2]
    for changes in ({"type": "custom_st.Transformer"}, {"path": "1_Pooling"}):
        (path / "modules.json").write_text(json.dumps([{**listed[0], **changes}, *listed[1:]]))
        with pytest.raises(UnsupportedModel, match=r"modules\.json"):
            start(path)
