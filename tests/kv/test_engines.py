"""Whole engines whose blocks come from outside their cache: the tokens are those of an engine that computes."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from lmkit import LLM, SamplingParams
from lmkit.api import ConfigError, LmkitError, SelectionError
from lmkit_testing.checkpoints import byte_tokenizer, tiny_checkpoint

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=0)
SEEDED = SamplingParams(max_tokens=8, temperature=1.0, seed=3, ignore_eos=True, logprobs=0)
PROMPT = [3 + i * 7 % 250 for i in range(100)]
OTHER = [3 + i * 11 % 250 for i in range(90)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_checkpoint("llama", tmp_path_factory.mktemp("tiny"), vocab_size=259, eos_token_id=None, head_dim=16)
    byte_tokenizer(path)
    return path


def engine(model: Path, connector: str = "none", options: dict[str, Any] | None = None, **more: Any) -> LLM:
    named = {f"kv_connector.{connector}.{name}": value for name, value in (options or {}).items()}
    usual: dict[str, Any] = {"dtype": "float32", "max_length": 256, "num_blocks": 64, "max_step_tokens": 64}
    if connector != "none":
        usual["kv_connector"] = connector
    return LLM(str(model), **{**usual, **named, **more})


def answer(llm: LLM, prompt: Sequence[int], params: SamplingParams = GREEDY) -> tuple[list[int], int]:
    """Tokens, and how many of the prompt were found."""
    (output,) = llm.generate([list(prompt)], params, progress=False)
    return list(output.token_ids), output.num_cached or 0


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"attention": "torch", "block_size": 8},  # pinned: another layout
        {"kv_dtype": "int8"},
        {"executor": "multiproc"},  # pinned: content crosses a socket
        {"dtype": "bfloat16"},
        {"depth": 2},
        {"proposer": "ngram"},
    ],
    ids=str,
)
def test_another_engine_computed_it(tiny: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    with engine(tiny, **more) as llm:
        want = [answer(llm, PROMPT)[0], answer(llm, PROMPT, SEEDED)[0], answer(llm, OTHER)[0]]
    options = {"folder": str(tmp_path)}
    with engine(tiny, "shared", options, **more) as llm:
        assert answer(llm, PROMPT) == (want[0], 0)
    with engine(tiny, "shared", options, **more) as llm:
        tokens, found = answer(llm, PROMPT)
        assert tokens == want[0]
        assert found >= 80
        assert answer(llm, PROMPT, SEEDED)[0] == want[1]
        assert answer(llm, OTHER) == (want[2], 0)
        assert answer(llm, PROMPT[:50] + OTHER)[1] >= 32


def test_windows_too(tmp_path: Path) -> None:
    """Groups with a window: the second engine finds what it needs of them."""
    model = tiny_checkpoint(
        "MistralForCausalLM", tmp_path / "model", vocab_size=259, eos_token_id=None, head_dim=16, sliding_window=24
    )
    byte_tokenizer(model)
    options = {"folder": str(tmp_path / "kv")}
    with engine(model) as llm:
        want = answer(llm, PROMPT)[0]
    for i in range(2):
        with engine(model, "shared", options) as llm:
            tokens, found = answer(llm, PROMPT)
            assert tokens == want
            assert (found > 0) == bool(i)


@pytest.mark.full("lmkit-stores")
def test_the_weights_count_and_not_their_path(tiny: Path, tmp_path: Path) -> None:
    options = {"folder": str(tmp_path / "kv")}
    with engine(tiny, "shared", options) as llm:
        want = answer(llm, PROMPT)[0]
    copy = shutil.copytree(tiny, tmp_path / "copy")
    with engine(copy, "shared", options) as llm:
        assert answer(llm, PROMPT)[1] > 0
    tuned = tiny_checkpoint(
        "llama", tmp_path / "tuned", vocab_size=259, eos_token_id=None, head_dim=16, seed=1
    )  # the same configuration
    byte_tokenizer(tuned)
    with engine(tuned, "shared", options) as llm:
        tokens, found = answer(llm, PROMPT)
    assert found == 0
    assert tokens != want
    for more in ({"dtype": "bfloat16"}, {"attention": "torch"}):  # pinned: another layout
        with engine(tiny, "shared", options, **more) as llm:
            assert answer(llm, PROMPT)[1] == 0, more


def test_what_was_evicted_is_read_back(tiny: Path, tmp_path: Path) -> None:
    """A cache for one prompt, and two that take turns."""
    with engine(tiny) as llm:
        want = {i: answer(llm, prompt)[0] for i, prompt in enumerate((PROMPT, OTHER))}
    # pinned: how many blocks a prompt takes
    small: dict[str, Any] = {"num_blocks": 9, "block_size": 16, "max_length": 120}
    for options in ({}, {"host": 1, "folder": str(tmp_path)}):
        with engine(tiny, "offload", options, **small) as llm:
            found = []
            for _ in range(3):
                for i, prompt in enumerate((PROMPT, OTHER)):
                    tokens, num = answer(llm, prompt)
                    assert tokens == want[i]
                    found.append(num)
            assert found[:2] == [0, 0]
            assert min(found[2:]) >= 48, found
    with engine(tiny, **small) as llm:
        assert max(answer(llm, prompt)[1] for prompt in (PROMPT, OTHER, PROMPT)) <= 16


def test_many_requests_in_a_small_cache(tiny: Path) -> None:
    """Rows are preempted, and go on with what was saved of them."""
    prompts = [[3 + (i * 13 + j * 7) % 250 for j in range(40)] for i in range(6)]
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    with engine(tiny) as llm:
        want = [output.token_ids for output in llm.generate(prompts, params, progress=False)]
    # pinned: how many blocks a prompt takes
    with engine(tiny, "offload", num_blocks=14, block_size=16, max_length=120) as llm:
        for _ in range(2):
            assert [output.token_ids for output in llm.generate(prompts, params, progress=False)] == want


def test_from_engine_to_engine(tiny: Path) -> None:
    """The one that answers computes the prompt's last block only; when the other is gone, all of it."""
    with engine(tiny) as llm:
        want = answer(llm, PROMPT)[0]
    address = f"127.0.0.1:{free_port()}"
    giving = engine(tiny, "tcp", {"listen": address})
    with giving as giver, engine(tiny, "tcp", {"peers": address, "pause": 0}) as taker:
        answer(giver, PROMPT, SamplingParams(max_tokens=1, temperature=0.0))
        answer(giver, [5])  # who has no thread saves the last step's blocks with the next
        assert answer(taker, PROMPT) == (want, 96)
        giver.close()
        assert answer(taker, OTHER)[1] == 0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        ({"prefix_cache": False}, SelectionError, "no_prefix_cache"),
        ({"tp": 2}, SelectionError, "ranks"),
        ({"kv_connector.shared.size": 0}, ConfigError, "size"),
        ({"kv_connector": "nope"}, LmkitError, "nope"),
    ],
    ids=str,
)
def test_refused_by_name(tiny: Path, tmp_path: Path, more: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        engine(tiny, "shared", {"folder": str(tmp_path)}, **more)


def test_recurrent_models_are_refused(tmp_path: Path) -> None:
    model = tiny_checkpoint("MambaForCausalLM", tmp_path / "model", vocab_size=259)
    byte_tokenizer(model)
    with pytest.raises(SelectionError, match="recurrent"):
        engine(model, "shared", {"folder": str(tmp_path)})
