"""Plugins are asked whether they run what is needed, and what they say is what the user hears."""

from __future__ import annotations

from typing import Any

import pytest
from lmkit import LLM
from lmkit.api import LmkitError
from lmkit_attention_torch.backend import TorchAttention

# pinned: it is this backend that is made to refuse
OPTIONS = {"max_length": 128, "kv_memory": "4MiB", "threads": 1, "attention": "torch"}


@pytest.mark.parametrize(
    ("method", "answer", "code", "words"),
    [
        ("can_run", "no Tuesdays", "no-candidate", "no Tuesdays"),
        ("block_sizes", (7, 9), "no-candidate", "block_size is 16, it has 7, 9"),
        ("can_run", ZeroDivisionError("x"), "plugin", "ZeroDivisionError"),
        ("block_sizes", ZeroDivisionError("x"), "plugin", "ZeroDivisionError"),
    ],
)
def test_attention_that_refuses_is_not_run(
    method: str, answer: Any, code: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def say(self: TorchAttention, need: Any, *device: Any) -> Any:
        asked.append(need)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(TorchAttention, method, say)
    with pytest.raises(LmkitError, match=words) as caught:
        LLM("demo", **OPTIONS)
    assert caught.value.code == code
    assert "torch" in str(caught.value)
    assert asked[0].block_size == 16


class Broken:
    def __init__(self) -> None:
        raise ZeroDivisionError("at construction")


def test_a_policy_that_cannot_be_made_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from lmkit.contracts import guard
    from lmkit.engine import build

    real = build.load_target
    for module in (build, guard):
        monkeypatch.setattr(module, "load_target", lambda c: Broken if c.kind == "scheduler" else real(c))
    with pytest.raises(LmkitError, match="scheduler") as caught:
        LLM("demo", **OPTIONS)
    assert caught.value.code == "plugin"
