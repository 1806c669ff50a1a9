"""A family of models and a logits processor of somebody else: found and run without a word about them here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from lmkit import LLM, SamplingParams
from lmkit.api import InvalidParam
from lmkit_testing.dists import write_dist

FAMILY = """
from lmkit.api import ModelSpec, hookimpl


@hookimpl
def lmkit_models():
    yield ModelSpec(
        name="outside", summary="A family of its own", target="outside_model.arch:Outside",
        architectures=("OutsideForCausalLM",), features=frozenset({"causal"}),
    )
"""

ARCH = """
from lmkit_decoders import DecoderArchitecture, usual_config


def outside(r):
    return usual_config(r, max_positions=512, tie=r.flag("tie_word_embeddings", False))


class Outside(DecoderArchitecture):
    configs = {"OutsideForCausalLM": outside}
"""

PROCESSOR = """
from lmkit.api import LogitsProcessorSpec, hookimpl


@hookimpl
def lmkit_logits_processors():
    yield LogitsProcessorSpec(name="only", summary="Some tokens only", target="outside_only.processor:Only")
"""

ONLY = """
from dataclasses import dataclass


@dataclass
class Options:
    token: int

    def __post_init__(self):
        if not isinstance(self.token, int):
            raise ValueError(f"token is {self.token!r}")


class Only:
    stage, keeps_argmax, options = "logits", False, Options

    def __init__(self):
        self.tokens = {}

    def add(self, slot, params, prompt):
        self.tokens[slot] = params.extra["only"]["token"]
        return True

    def remove(self, slot):
        del self.tokens[slot]

    def apply(self, logits, ctx):
        for row, slot in zip(logits, ctx.slots):
            row -= 1e9
            row[self.tokens[slot]] = 0
"""


@pytest.fixture
def checkpoint(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny checkpoint under a name that only the family from outside knows."""
    site = tmp_path / "site"
    model = {"outside_model.hooks": FAMILY, "outside_model.arch": ARCH}
    write_dist(site, "outside-model", {"model": {"OutsideForCausalLM": "outside_model.hooks"}}, model)
    only = {"outside_only.hooks": PROCESSOR, "outside_only.processor": ONLY}
    write_dist(site, "outside-only", {"logits_processor": {"only": "outside_only.hooks"}}, only)
    monkeypatch.syspath_prepend(str(site))
    folder = shutil.copytree(tiny, tmp_path / "checkpoint")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["OutsideForCausalLM"]}))
    return folder


def test_they_run(checkpoint: Path, tiny: Path) -> None:
    """Rows that name the processor get its tokens, others in the same steps what they get without it."""
    plain = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    with LLM(str(tiny), max_rows=4) as llm:
        expected = llm.generate("hello", plain)[0].token_ids
    with LLM(str(checkpoint), max_rows=4) as llm:
        only = [
            SamplingParams(max_tokens=6, temperature=t, ignore_eos=True, extra={"only": {"token": token}})
            for t, token in ((0.0, 7), (1.0, 9))
        ]
        outputs = llm.generate(["hello", "hello", "hello"], [plain, *only])
        assert [o.token_ids for o in outputs] == [expected, [7] * 6, [9] * 6]
        for extra in ({"only": {"token": "7"}}, {"only": 7}, {"only": {"tokens": 7}}, {"other": {}}):
            with pytest.raises(InvalidParam, match=r"extra\.(only|other)"):
                llm.generate("hello", SamplingParams(extra=extra))
        assert llm.generate("hello", plain)[0].token_ids == expected
