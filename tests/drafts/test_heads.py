"""Drafts that run a model guess what a plain reference of them guesses, which knows no cache and no steps.

Where something is wrong with what they read or keep, they guess worse. Tokens are the same in any case.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lmkit import LLM, SamplingParams
from lmkit.api import ConfigError, SelectionError, UnsupportedModel
from lmkit.config import CacheConfig, EngineConfig, ModelConfig, SchedConfig
from lmkit_testing.checkpoints import byte_tokenizer, tiny_checkpoint
from lmkit_testing.draft_heads import KNOWN, TAPS, eagle1, eagle3, further, medusa
from lmkit_testing.model import installed, prompt, reference
from lmkit_worker.along import BEHIND
from lmkit_worker.branches import paths
from lmkit_worker.drafting import Drafting
from lmkit_worker.trees import TreeDrafting
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

for _name in ("eagle", "medusa", "mtp", "draft_model"):
    pytest.importorskip(f"lmkit_proposer_{_name}", reason="the proposer is not installed")

VOCAB, LAYERS = 259, 4
PROMPTS = [prompt(VOCAB, 5, seed=5), prompt(VOCAB, 40, seed=40)]
PARAMS = [
    SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=24, temperature=1.0, seed=7, ignore_eos=True),
]
MIX = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_routed_experts": 8, "n_group": 2, "topk_group": 1}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
Guesses = list[tuple[list[int], list[int]]]  # text, and what was guessed to follow it


def proposals(llm: LLM) -> Any:
    return llm._engine.core.executor.worker.runner.head.proposals


def engine(model: Path, proposer: str, attention: str = "auto", /, **options: Any) -> LLM:
    config = EngineConfig(
        model=ModelConfig(str(model), dtype="float32", max_length=128),
        cache=CacheConfig(num_blocks=64),
        sched=SchedConfig(max_tokens=32, max_rows=8),
        wanted={"proposer": proposer, "attention": attention},
        plugins={f"proposer.{proposer}": options} if options else {},
    )
    return LLM(config=config, host=installed())


def answers(llm: LLM) -> list[list[int]]:
    outputs = [llm.generate(PROMPTS, params, progress=False) for params in PARAMS]
    assert all(output.outputs[0].error is None for found in outputs for output in found)
    return [output.token_ids for found in outputs for output in found]


@pytest.fixture
def guesses(monkeypatch: pytest.MonkeyPatch) -> Guesses:
    """What any draft guesses from now on. Rows are asked in each step, for three tokens."""
    found: Guesses = []
    ask = Drafting.guess

    def guess(self: Drafting, step: Any, hidden: Tensor, result: Any, asked: Any, most: Any) -> list[list[int]]:
        rows = [row for row in step.sample_rows.tolist() if result.tokens[row]]
        given = ask(self, step, hidden, result, rows, [3] * len(rows))
        texts = [self._rows.row_tokens(int(step.slots[row])).tolist() for row in rows]
        found.extend(zip(texts, given, strict=True))
        by_row = dict(zip(rows, given, strict=True))
        return [by_row[row] for row in asked]

    monkeypatch.setattr(Drafting, "guess", guess)
    monkeypatch.setattr("lmkit_worker.lengths.Lengths.hopeless", False)  # else it is not told of most steps
    return found


def check(found: Guesses, expected: Callable[[list[int], int], list[int]]) -> None:
    """Every third guess is what the reference guesses."""
    assert sum(len(guess) for _, guess in found) > 50
    for text, guess in found[::3]:
        assert guess == expected(text, len(guess)), text


class Head:
    """A layer of the library behind a projection: reads the whole text each time."""

    def __init__(self, model: Any, enter: Callable[[Tensor, Tensor], Tensor], layer: Any, logits: Any, taps: Any = ()):
        self.model, self.enter, self.layer, self.logits, self.taps = model, enter, layer, logits, taps

    @torch.inference_mode()
    def after(self, text: list[int], path: list[int]) -> Tensor:
        """The logits [V] of what follows the text and guesses."""
        ids = torch.tensor(text)
        found = self.model.model(ids[None, :-1], output_hidden_states=True)
        hidden = found.last_hidden_state[0]
        if self.taps:
            hidden = torch.cat([found.hidden_states[i][0] for i in self.taps], -1)
        inputs = self.enter(ids[1:], hidden)
        for token in path:
            inputs = torch.cat((inputs, self.enter(torch.tensor([token]), self.layer(inputs)[-1:])))
        return self.logits(self.layer(inputs)[-1:]).flatten()

    def guess(self, text: list[int], num: int) -> list[int]:
        """The first `num` tokens that follow, each the likeliest."""
        tokens: list[int] = []
        for _ in range(num):
            tokens.append(int(self.after(text, tokens).argmax()))
        return tokens


def mask_and_turns(model: Any, h: Tensor) -> dict[str, Any]:
    """What a layer of the library takes beside hidden states [1, T, D]."""
    n = h.shape[1]
    positions = torch.arange(n)[None]
    mask = torch.full((n, n), float("-inf")).triu(1)[None, None]
    turns = model.model.rotary_emb(h, positions)
    return {"attention_mask": mask, "position_ids": positions, "position_embeddings": turns}


def run_layer(model: Any, layer: Any, inputs: Tensor) -> Tensor:
    h = inputs[None]
    out = layer(h, **mask_and_turns(model, h))
    return (out[0] if isinstance(out, tuple) else out)[0]


def rms(weight: Tensor, eps: float) -> Callable[[Tensor], Tensor]:
    return lambda x: F.rms_norm(x, weight.shape, weight, eps)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    tiny_checkpoint("LlamaForCausalLM", directory, vocab_size=VOCAB, eos_token_id=None, num_hidden_layers=LAYERS)
    byte_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def plain(llama: Path) -> list[list[int]]:
    with engine(llama, "none") as llm:
        return answers(llm)


def of_eagle1(model: Path, folder: Path) -> Head:
    hf, tensors = reference(model, "float32"), load_file(folder / "model.safetensors")
    layer = type(hf.model.layers[0])(hf.config, layer_idx=0)
    layer.input_layernorm = torch.nn.Identity()
    layer.load_state_dict({n.removeprefix("layers.0."): t for n, t in tensors.items() if n.startswith("layers.0.")})

    def enter(ids: Tensor, hidden: Tensor) -> Tensor:
        return F.linear(torch.cat((hf.model.embed_tokens(ids), hidden), -1), tensors["fc.weight"], tensors["fc.bias"])

    return Head(hf, enter, lambda h: run_layer(hf, layer, h), hf.lm_head)


def test_eagle_1(llama: Path, plain: list[list[int]], tmp_path: Path, guesses: Guesses) -> None:
    head = eagle1(llama, tmp_path)
    with engine(llama, "eagle", model=str(head)) as llm:
        assert answers(llm) == plain
    check(guesses, of_eagle1(llama, head).guess)


class Passes:
    """A clock that passes of the model and of what guesses for it turn: a guess of one row is a pass."""

    def __init__(self, llm: LLM, cost: float, monkeypatch: pytest.MonkeyPatch) -> None:
        """`cost` of a pass of the draft, of one of the model's."""
        self.model = self.draft = self.num_tokens = 0
        self._cost, runner = cost, llm._engine.core.executor.worker.runner
        source = proposals(llm).source
        monkeypatch.setattr("lmkit_worker.proposals.clock", lambda: self.model + self._cost * self.draft)
        self._count(runner, "_hidden", monkeypatch, lambda step: self._add(model=1))
        passes = [source._along] if isinstance(source, TreeDrafting) else [source, source._along]
        for each, name in zip(passes[::-1], ("_run", "_follow"), strict=False):
            self._count(each, name, monkeypatch, lambda step, *_: self._add(draft=1))
        if isinstance(source, TreeDrafting):
            self._count(source, "_level", monkeypatch, lambda *_: self._add(draft=1))
        else:
            self._count(source._ahead, "begin", monkeypatch, lambda *args: self._add(draft=args[3]))

    def _add(self, model: int = 0, draft: int = 0) -> None:
        self.model += model
        self.draft += draft

    def _count(self, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch, note: Callable[..., None]) -> None:
        run = getattr(owner, name)

        def counted(*args: Any) -> Any:
            note(*args)
            return run(*args)

        monkeypatch.setattr(owner, name, counted)


@pytest.mark.parametrize("tree", ["", "3,2"])
@pytest.mark.full("lmkit-worker", "lmkit-proposer-eagle")
def test_a_head_that_is_never_right_costs_a_twentieth_at_most(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tree: str
) -> None:
    """In passes, where one of the head costs a third of the model's."""
    head, params = eagle1(llama, tmp_path), SamplingParams(max_tokens=100, temperature=1.0, seed=1, ignore_eos=True)
    with engine(llama, "eagle", model=str(head), tree=tree) as llm:
        passes = Passes(llm, 1 / 3, monkeypatch)
        for _ in range(2):  # the second counts
            model, draft, num = passes.model, passes.draft, 0
            for _number in range(3):
                (output,) = llm.generate([PROMPTS[0]], params, progress=False)
                num += len(output.outputs[0].token_ids)
        model, draft = passes.model - model, passes.draft - draft
    assert draft < num / 20, "it is not even run along"
    assert model + draft / 3 < 1.05 * num, (model, draft, num)


@pytest.mark.parametrize("proposer", ["eagle", "draft_model", "medusa"])
def test_a_draft_that_nobody_asks_hardly_runs(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proposer: str
) -> None:
    if proposer == "draft_model":
        tiny_checkpoint("LlamaForCausalLM", tmp_path, vocab_size=VOCAB, eos_token_id=None, num_hidden_layers=1, seed=3)
        byte_tokenizer(tmp_path)
    folder = {"eagle": eagle1, "medusa": medusa}.get(proposer, lambda _, path: path)(llama, tmp_path)
    monkeypatch.setattr("lmkit_worker.lengths.Lengths.choose", lambda self, slots, wanted: [0] * len(slots))
    with engine(llama, proposer, model=str(folder)) as llm:
        passes = Passes(llm, 1.0, monkeypatch)
        llm.generate([PROMPTS[0], PROMPTS[0]], SamplingParams(max_tokens=100, ignore_eos=True), progress=False)
    assert passes.model >= 100
    assert passes.draft <= (0 if proposer == "medusa" else 1 + 200 // BEHIND)  # a step may have so many tokens


def check_trees(llm: LLM, head: Head, children: list[int]) -> list[list[int]]:
    """The answers of an engine whose guesses branch: those after each text and path are the reference's likeliest
    there, in its order, and no node is less likely than one that was left out beside it."""
    source = proposals(llm).source
    assert isinstance(source, TreeDrafting)
    found: list[tuple[list[int], list[int], list[int]]] = []
    ask = source.guess

    def guess(step: Any, hidden: Tensor, result: Any, asked: Any, most: Any) -> list[list[int]]:
        rows = [row for row in step.sample_rows.tolist() if result.tokens[row]]
        if step.plan.step % 5 < 2:  # nobody asks: the head catches up later
            ask(step, hidden, result, [], [])
            return [[] for _ in asked]
        given = ask(step, hidden, result, rows, [8] * len(rows))
        for row, tokens in zip(rows, given, strict=True):
            text = source._rows.row_tokens(int(step.slots[row])).tolist()
            found.append((text, tokens, result.parents[row]))
        by_row = dict(zip(rows, given, strict=True))
        return [by_row[row] for row in asked]

    source.guess = guess  # type: ignore[method-assign]
    outputs = answers(llm)
    assert sum(len(parents) - len(set(parents)) for _, _, parents in found) > 50
    assert sum(max(map(len, paths(tokens, parents))) > 1 for _, tokens, parents in found) > 20
    for text, tokens, parents in found[::3]:
        for i, path in enumerate(paths(tokens, parents)):
            siblings = [token for token, parent in zip(tokens, parents, strict=True) if parent == i - 1]
            if siblings:
                wanted = head.after(text, path).topk(children[len(path)]).indices.tolist()
                assert siblings == wanted[: len(siblings)], (text, path)
    return outputs


@pytest.mark.parametrize("attention", ["cpu", "torch"])
@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.one_in(4)
def test_eagle_with_trees(tmp_path: Path, version: int, attention: str) -> None:
    pytest.importorskip(f"lmkit_attention_{attention}", reason="the backend is not installed")
    sizes = {"vocab_size": VOCAB, "eos_token_id": None, "num_hidden_layers": LAYERS, "head_dim": 16}
    tiny_checkpoint("LlamaForCausalLM", tmp_path, **sizes)
    byte_tokenizer(tmp_path)
    folder = tmp_path / "head"
    folder = eagle1(tmp_path, folder) if version == 1 else eagle3(tmp_path, folder, "midlayer.")
    head = of_eagle1(tmp_path, folder) if version == 1 else of_eagle3(tmp_path, folder, "midlayer.")
    with engine(tmp_path, "none", attention) as llm:
        wanted = answers(llm)
    with engine(tmp_path, "eagle", attention, model=str(folder), tree="3,2,2,1") as llm:
        assert check_trees(llm, head, [3, 2, 2, 1]) == wanted


def of_eagle3(model: Path, folder: Path, prefix: str) -> Head:
    hf, t = reference(model, "float32"), load_file(folder / "model.safetensors")
    eps, size = hf.config.rms_norm_eps, hf.config.hidden_size
    layer = type(hf.model.layers[0])(hf.config, layer_idx=0)
    own = {name.removeprefix(prefix): value for name, value in t.items() if name.startswith(prefix)}
    attention = layer.self_attn
    for part in "qkv":
        weight = own[f"self_attn.{part}_proj.weight"]
        setattr(attention, f"{part}_proj", torch.nn.Linear(2 * size, len(weight), bias=False))
    layer.load_state_dict({name: value for name, value in own.items() if name != "hidden_norm.weight"})
    norm = rms(own["hidden_norm.weight"], eps)

    def enter(ids: Tensor, hidden: Tensor) -> Tensor:
        hidden = hidden if hidden.shape[-1] == size else F.linear(hidden, t["fc.weight"])
        return torch.cat((hf.model.embed_tokens(ids), hidden), -1)

    def run(inputs: Tensor) -> Tensor:
        embedded, hidden = inputs.chunk(2, -1)
        read = torch.cat((layer.input_layernorm(embedded), norm(hidden)), -1)[None]
        hidden = hidden + attention(read, **mask_and_turns(hf, read))[0][0]
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def logits(state: Tensor) -> Tensor:
        found = torch.full((VOCAB,), float("-inf"))
        ids = torch.arange(KNOWN) + t["d2t"]
        found[ids] = F.linear(rms(t["norm.weight"], eps)(state), t["lm_head.weight"])[0]
        return found

    return Head(hf, enter, run, logits, TAPS)


@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0."])
@pytest.mark.one_in(2)
def test_eagle_3(llama: Path, plain: list[list[int]], tmp_path: Path, guesses: Guesses, prefix: str) -> None:
    head = eagle3(llama, tmp_path, prefix)
    with engine(llama, "eagle", model=str(head)) as llm:
        assert answers(llm) == plain
    check(guesses, of_eagle3(llama, head, prefix).guess)


def test_medusa(llama: Path, plain: list[list[int]], tmp_path: Path, guesses: Guesses) -> None:
    folder = medusa(llama, tmp_path)
    hf, t = reference(llama, "float32"), load_file(folder / "model.safetensors")

    @torch.inference_mode()
    def expected(text: list[int], num: int) -> list[int]:
        hidden, found = hf.model(torch.tensor(text)[None, :-1]).last_hidden_state[0, -1], []
        for head in range(num):
            h = hidden
            for i in range(2):
                h = h + F.silu(F.linear(h, t[f"{head}.{i}.linear.weight"], t[f"{head}.{i}.linear.bias"]))
            found.append(int(F.linear(h, t[f"{head}.2.weight"]).argmax()))
        return found

    with engine(llama, "medusa", model=str(folder)) as llm:
        assert answers(llm) == plain
    check(guesses, expected)


def test_draft_model(llama: Path, plain: list[list[int]], tmp_path: Path, guesses: Guesses) -> None:
    tiny_checkpoint("LlamaForCausalLM", tmp_path, vocab_size=VOCAB, eos_token_id=None, num_hidden_layers=1, seed=3)
    byte_tokenizer(tmp_path)
    hf = reference(tmp_path, "float32")

    @torch.inference_mode()
    def expected(text: list[int], num: int) -> list[int]:
        ids = list(text)
        for _ in range(num):
            ids.append(int(hf(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(text) :]

    with engine(llama, "draft_model", model=str(tmp_path)) as llm:
        assert answers(llm) == plain
    check(guesses, expected)


FURTHER = {"Glm4MoeForCausalLM": MIX | {"head_dim": 16}, "DeepseekV3ForCausalLM": MIX | LATENT, "MiMoForCausalLM": {}}


def of_further(hf: Any, tensors: dict[str, Tensor], name: str) -> Head:
    mimo = name.startswith("MiMo")
    new = "model.mtp_layers.0." if mimo else f"model.layers.{len(hf.model.layers)}."
    own = {n.removeprefix(new): t for n, t in tensors.items() if n.startswith(new)}
    names = (
        ("token_layernorm", "hidden_layernorm", "final_layernorm") if mimo else ("enorm", "hnorm", "shared_head.norm")
    )
    embedding, hidden_norm, last = (rms(own.pop(f"{n}.weight"), hf.config.rms_norm_eps) for n in names)
    projection = own.pop(f"{'input_proj' if mimo else 'eh_proj'}.weight")
    layer = hf.model.layers[-1]
    state = layer.state_dict()
    if any(n not in own for n in state):  # the library holds experts stacked
        count = hf.config.n_routed_experts
        up = [torch.cat([own[f"mlp.experts.{e}.{p}_proj.weight"] for p in ("gate", "up")]) for e in range(count)]
        own |= {"mlp.experts.gate_up_proj": torch.stack(up)}
        own |= {"mlp.experts.down_proj": torch.stack([own[f"mlp.experts.{e}.down_proj.weight"] for e in range(count)])}
    layer = copy.deepcopy(layer)
    layer.load_state_dict({n: own[n] for n in state})

    def enter(ids: Tensor, hidden: Tensor) -> Tensor:
        parts = embedding(hf.model.embed_tokens(ids)), hidden_norm(hidden)
        return F.linear(torch.cat(parts[::-1] if mimo else parts, -1), projection)

    return Head(hf, enter, lambda h: last(run_layer(hf, layer, h)), hf.lm_head)


@pytest.mark.parametrize("name", FURTHER)
@pytest.mark.one_in(3)
def test_mtp(name: str, tmp_path: Path, guesses: Guesses) -> None:
    family = "Qwen2ForCausalLM" if name.startswith("MiMo") else name
    tiny_checkpoint(family, tmp_path, **{**FURTHER[name], "vocab_size": VOCAB, "eos_token_id": None})
    byte_tokenizer(tmp_path)
    hf = reference(tmp_path, "float32")
    further(tmp_path, name)
    with engine(tmp_path, "none") as llm:
        wanted = answers(llm)
    with engine(tmp_path, "mtp") as llm:
        assert answers(llm) == wanted
    check(guesses, of_further(hf, load_file(tmp_path / "model.safetensors"), name).guess)


def refused(llama: Path, proposer: str, **options: Any) -> str:
    with pytest.raises((ConfigError, UnsupportedModel)) as e:
        engine(llama, proposer, **options)
    return f"{e.value.message}; {e.value.fix}"


def test_what_does_not_fit_the_model_is_refused(llama: Path, tmp_path: Path) -> None:
    def draft(name: str, **config: Any) -> str:
        usual = {"vocab_size": VOCAB, "eos_token_id": None, "num_hidden_layers": 1}
        tiny_checkpoint("LlamaForCausalLM", tmp_path / name, **{**usual, **config})
        return str(tmp_path / name)

    words = refused(llama, "draft_model", model=draft("more", vocab_size=300))
    assert "300 tokens" in words
    assert "259" in words
    words = refused(llama, "draft_model", model=draft("short", max_position_embeddings=64))
    assert "64 tokens" in words
    assert "128" in words
    other = Path(draft("other"))
    byte_tokenizer(other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[10:12]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "2 of the" in refused(llama, "draft_model", model=str(other))
    assert "--proposer.draft_model.model" in refused(llama, "draft_model")

    size = json.loads((llama / "config.json").read_text())["hidden_size"]
    words = refused(llama, "eagle", model=str(eagle1(llama, tmp_path / "wide", hidden_size=2 * size)))
    assert f"hidden_size of the head = {2 * size}" in words
    assert f"{size}, that of the model" in words
    assert "--proposer.eagle.model" in refused(llama, "eagle")
    head = str(eagle1(llama, tmp_path / "eagle"))
    with pytest.raises(SelectionError, match=r"flex.*tree"):
        engine(llama, "eagle", "flex", model=head, tree="2,2")
    for tree in ("4,", "0", "a", "4,2;1", "17", ",".join("1" * 17)):
        words = refused(llama, "eagle", model=head, tree=tree)
        assert f"{tree!r} is not at most 16 numbers from 1 to 16" in words
    words = refused(llama, "medusa", model=str(medusa(llama, tmp_path / "heads", vocab_size=300)))
    assert "300" in words
    assert "259" in words
    assert "LlamaMTP" in refused(llama, "mtp")
