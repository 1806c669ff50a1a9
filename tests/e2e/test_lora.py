"""Adapters: eight in one batch, each as if alone and as if merged; loads, names and refusals."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lmkit import LLM, SamplingParams
from lmkit.api import CapacityError, CheckpointError, ConfigError, InvalidParam, LmkitError
from lmkit_testing.checkpoints import byte_tokenizer, tiny_checkpoint
from lmkit_testing.draft_heads import eagle1

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of peft beside this transformers
    pytest.mark.filterwarnings("ignore::UserWarning:peft.*"),  # that it saves embeddings too
]
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
VOCAB = ["embed_tokens", "lm_head"]
PROMPT = list(range(10, 41))
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, logprobs=5, ignore_eos=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_checkpoint("llama", tmp_path_factory.mktemp("base"), vocab_size=259)
    byte_tokenizer(path)
    return path


def make(base: Path, folder: Path, seed: int, merged: Path | None = None, **changes: object) -> Path:
    """A random adapter; with `merged`, also the model that has it in its weights."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")  # seconds to import
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    options = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS, **changes}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            noise = 0.1 * torch.randn(parameter.shape, generator=generator)
            if "lora_" in name:
                parameter.copy_(noise)
            elif "modules_to_save" in name:
                parameter.add_(noise)
    adapted.save_pretrained(folder)
    if merged is not None:
        adapted.merge_and_unload().save_pretrained(merged)
        byte_tokenizer(merged)
    return folder


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Path]]:
    """(adapter, merged model) of different ranks and targets."""
    made = []
    kinds = [{}, {"r": 1}, {"r": 16, "lora_alpha": 4}, {"target_modules": ["q_proj", "v_proj"]},
             {"target_modules": ["down_proj"]}, {"use_rslora": True}, {"r": 7},
             {"layers_to_transform": [1]}, {"target_modules": ["q_proj", *VOCAB]}, {"modules_to_save": VOCAB},
             {"target_modules": ["lm_head"]}]  # fmt: skip
    for i, changes in enumerate(kinds):
        folder = tmp_path_factory.mktemp(f"adapter{i}")
        made.append((make(base, folder / "a", i, folder / "m", **changes), folder / "m"))
    return made


def start(path: Path, **options: object) -> LLM:
    return LLM(str(path), **{"dtype": "float32", "kv_memory": "8MiB", **options})


@pytest.fixture(scope="module")
def willing(base: Path) -> Iterator[LLM]:
    """An engine that takes adapters."""
    with start(base, enable_lora=True) as llm:
        yield llm


def shown(output) -> tuple[list[int], list[float]]:
    return output.token_ids, [lp.logprob for lp in output.logprobs]


def test_a_mixed_batch_equals_each_alone_and_merged(base: Path, adapters) -> None:
    modules = ",".join(f"a{i}={path}" for i, (path, _) in enumerate(adapters))
    names = [None, *(f"a{i}" for i in range(len(adapters)))]
    with start(base, lora_modules=modules, max_step_tokens=48) as llm:
        together = [shown(o) for o in llm.generate([PROMPT] * len(names), PARAMS, adapter=names)]
        alone = [shown(llm.generate([PROMPT], PARAMS, adapter=name)[0]) for name in names]
    merged = []
    for path in (base, *(m for _, m in adapters)):
        with start(path) as llm:
            merged.append(shown(llm.generate([PROMPT], PARAMS)[0]))
    for mixed, single, other in zip(together, alone, merged, strict=True):
        assert mixed[0] == single[0] == other[0]
        assert mixed[1] == pytest.approx(single[1], abs=1e-4)
        assert mixed[1] == pytest.approx(other[1], abs=1e-4)
    assert len({tuple(tokens) for tokens, _ in together}) > 4  # they do change what it says


def test_the_adapter_is_in_the_prefix_hash(base: Path, adapters) -> None:
    with start(base, lora_modules=f"a={adapters[0][0]},b={adapters[1][0]}") as llm:
        for name in ("a", "b", None):
            first, again = (llm.generate([PROMPT], PARAMS, adapter=name)[0] for _ in range(2))
            assert first.num_cached == 0
            assert again.num_cached > 0
            assert shown(first)[0] == shown(again)[0]


def test_a_name_that_moves_leaves_running_requests_alone(base: Path, adapters) -> None:
    """A request keeps the weights it began with; the old ones go when nobody uses them."""
    with start(base, enable_lora=True, max_loras=2) as llm:
        llm.load_adapter("a", str(adapters[0][0]))
        core = llm._engine.core
        expected = shown(llm.generate([PROMPT], PARAMS, adapter="a")[0])
        stream = llm.stream(PROMPT, PARAMS)
        stream.close()
        from lmkit.api import EngineRequest

        core.add(EngineRequest("r", PROMPT, PARAMS, adapter="a"))
        tokens = []
        for step in range(64):
            for event in core.step():
                tokens += event.tokens
            if step == 3:
                llm._engine.core.adapters.load("a", str(adapters[2][0]))
                assert len(core.adapters.loaded) == 2
            if not core.has_work():
                break
        assert tokens == expected[0]
        assert len(core.adapters.loaded) == 1
        assert shown(llm.generate([PROMPT], PARAMS, adapter="a")[0])[0] != expected[0]
        llm.unload_adapter("a")
        assert not core.adapters.loaded
        with pytest.raises(InvalidParam, match="adapter"):
            llm.generate([PROMPT], PARAMS, adapter="a")


def test_loading_is_off_and_bounded(base: Path, adapters) -> None:
    with start(base) as llm, pytest.raises(ConfigError, match="without adapters"):
        llm.load_adapter("a", str(adapters[0][0]))
    with start(base, enable_lora=True, max_loras=1) as llm:
        llm.load_adapter("a", str(adapters[0][0]))
        with pytest.raises(CapacityError, match="1 adapters"):
            llm.load_adapter("b", str(adapters[1][0]))
        with pytest.raises(ConfigError, match="name"):
            llm.load_adapter("../b c", str(adapters[1][0]))
    with pytest.raises(ConfigError, match="NAME=PATH"):
        start(base, lora_modules="nonsense")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"r": 512}, "r = 512"),
        ({"r": "4"}, "r = '4'"),
        ({"use_dora": True}, "has no lora_magnitude_vector"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["q_proj"]}, "modules_to_save = .* lm_head, embed_tokens"),
        ({"modules_to_save": ["lm_head"]}, "no weight for modules_to_save lm_head"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"rank_pattern": {"q_proj": 2}}, r"q_proj.lora_A.weight has shape \[4, 48\], needs \[2, 48\]"),
        ({"rank_pattern": {"q_proj": 512}}, "rank_pattern = 512"),
        ({"rank_pattern": {"(q+_proj": 2}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"lora_alpha": None}, "lora_alpha"),
    ],
)
def test_settings_that_cannot_be_honoured(willing: LLM, adapters, tmp_path: Path, changes: dict, words: str) -> None:
    path = copy(adapters[0][0], tmp_path)
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    refused(willing, path, words)


def test_tensors_that_do_not_fit(willing: LLM, adapters, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = copy(adapters[0][0], tmp_path)
    tensors = load_file(path / "adapter_model.safetensors")
    name = next(n for n in sorted(tensors) if "lora_A" in n)
    other = name.replace("layers.0", "layers.7")
    for changed, words in (
        ({**tensors, name: torch.zeros(4, 99)}, r"\[4, 99\], needs \[4, 80\]"),
        ({**{k: v for k, v in tensors.items() if k != name}}, "lora_B only"),
        ({**tensors, other: tensors[name].clone()}, "nearest: model.layers"),
        ({**tensors, "base_model.model.lm_head.lora_A.weight": torch.zeros(4, 48)}, "lora_A only"),
        ({**tensors, "base_model.model.lm_head.weight": torch.zeros(260, 48)}, r"\[260, 48\], needs \[259, 48\]"),
        ({**tensors, "base_model.model.model.norm.lora_A.weight": torch.zeros(4, 48)}, "adapters may target q_proj"),
        ({**tensors, "base_model.model.model.layers.0.self_attn.q_proj.weight": torch.zeros(48, 48)}, "nothing in"),
        ({**tensors, name: tensors[name] * float("nan")}, "not finite"),
        ({**tensors, name: tensors[name].to(torch.int8)}, "int8"),
        ({}, "no tensors"),
    ):
        save_file(changed, path / "adapter_model.safetensors")
        refused(willing, path, words)
    (path / "adapter_model.safetensors").unlink()
    (path / "adapter_model.bin").write_bytes(b"x")
    refused(willing, path, "pickled")
    refused(willing, tmp_path / "nowhere", "adapter_config.json")


def test_tied_embeddings_have_no_adapter(tmp_path: Path) -> None:
    """Of one weight in two places, PEFT changes one when it runs and both when it merges."""
    tied = tiny_checkpoint("llama", tmp_path / "tied", vocab_size=259, tie_word_embeddings=True)
    byte_tokenizer(tied)
    with start(tied, enable_lora=True) as llm:
        refused(llm, make(tied, tmp_path / "a", 0, target_modules=["embed_tokens"]), "adapters may target q_proj")


def test_an_adapter_of_another_base(willing: LLM, tmp_path: Path) -> None:
    larger = tiny_checkpoint("llama", tmp_path / "larger", vocab_size=259, hidden_size=64)
    refused(willing, make(larger, tmp_path / "a", 0), f"made for '{larger}'")


def copy(source: Path, target: Path) -> Path:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (target / name).write_bytes((source / name).read_bytes())
    return target


def refused(llm: LLM, path: Path, words: str) -> None:
    """Typed, by name; and the engine goes on."""
    with pytest.raises(LmkitError, match=words) as failure:
        llm.load_adapter("a", str(path))
    assert isinstance(failure.value, CheckpointError)
    assert not llm._engine.core.adapters.loaded
    assert llm.generate([PROMPT], SamplingParams(max_tokens=1))[0].token_ids


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("proposer", "more"), [("eagle", {}), ("eagle", {"tree": "3,2"}), ("draft_model", {})])
def test_drafts_change_no_token_of_adapters(
    base: Path, adapters: list[tuple[Path, Path]], tmp_path: Path, proposer: str, more: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A draft runs without adapters: what it guesses for rows that have one is less often right, and no more."""
    pytest.importorskip(f"lmkit_proposer_{proposer}", reason="the proposer is not installed")
    model = str(eagle1(base, tmp_path)) if proposer == "eagle" else str(base)
    monkeypatch.setattr("lmkit_worker.lengths.TOKENS", 40)  # for each row several
    plugins, given = {f"proposer.{proposer}": {"model": model, **more}}, [None, *(f"a{i}" for i in range(4))]
    modules = ",".join(f"a{i}={adapters[i][0]}" for i in range(4))
    found = []
    for options in ({}, {"proposer": proposer, "plugins": plugins}):
        with start(base, lora_modules=modules, **options) as llm:
            outputs = llm.generate([PROMPT] * len(given), PARAMS, adapter=given, progress=False)
            found.append([output.token_ids for output in outputs])
            stats = llm._engine.core.scheduler.stats()
    assert found[0] == found[1]
    assert stats.num_drafts > 0
