"""The blank between a prompt and its continuation, where the decoder drops a blank that begins a text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from lmkit import LLM, SamplingParams
from lmkit.api import Text, TokenEvent
from lmkit.text.stream import Finish
from tokenizers import Tokenizer, decoders, models

from .conftest import VOCAB

WORDS = ["<unk>", "<s>", "</s>", "\u2581", "\u2581Lily", "\u2581were", "\u2581playing", "ing", "."]
WERE = WORDS.index("\u2581were")
TEMPLATE = "{% for m in messages %}<s>{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def blanks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer like SentencePiece's, beside a template."""
    path = tmp_path_factory.mktemp("blanks")
    words = WORDS + [f"<0x{b:02X}>" for b in range(VOCAB - len(WORDS))]
    raw = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>"))
    raw.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens(["<unk>", "<s>", "</s>"])
    raw.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def llm(tiny: Path, blanks: Path) -> Iterator[LLM]:
    with LLM(str(tiny), tokenizer=str(blanks)) as llm:
        yield llm


def params(**more: object) -> SamplingParams:
    """All tokens are " were"."""
    return SamplingParams(temperature=0.0, ignore_eos=True, logit_bias=((WERE, 100.0),), **{"max_tokens": 2, **more})  # type: ignore[arg-type]


def test_generate_keeps_it(llm: LLM) -> None:
    (output,) = llm.generate([[WORDS.index("\u2581Lily")]], params(logprobs=0), n=2)
    assert [c.text for c in output.outputs] == [" were were"] * 2


def test_stream_keeps_it(llm: LLM) -> None:
    events = list(llm.stream("Lily", params()))
    assert "".join(e.text for e in events if isinstance(e, Text)) == " were were"
    assert isinstance(events[-1], Finish)
    assert events[-1].usage.prompt_tokens == len(llm.text.encode_prompt("Lily"))


def test_a_stop_string_that_begins_with_it_is_found(llm: LLM) -> None:
    (output,) = llm.generate("Lily", params(stop=(" were",)))
    assert (output.text, output.finish_reason, output.outputs[0].stop) == ("", "stop", " were")


def test_a_message_that_is_continued_keeps_it(llm: LLM) -> None:
    messages = [{"role": "assistant", "content": "Lily"}]
    (output,) = llm.chat(messages, params(), continue_final_message=True)
    assert output.text == " were were"
    (output,) = llm.chat(messages, params())  # an answer of its own begins anew
    assert output.text == "were were"


def test_the_text_side_needs_the_prompt_for_it(llm: LLM) -> None:
    """One argument says both what the prompt costs and what the text joins to."""
    ids = llm.text.encode_prompt("Lily")
    stream = llm.text.output_stream(params(), parse=False, prompt_ids=ids)
    assert stream.feed(TokenEvent("r", [WERE]))[0] == Text(" were")
    assert stream.usage.prompt_tokens == len(ids)


def test_a_thought_that_is_continued_stays_one() -> None:
    """Typed markers are text for the model, and yet the client said where the answer goes on."""
    with LLM("demo", kv_memory="8MiB") as llm:
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>\nI wonder"}]
        (output,) = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=4), continue_final_message=True)
        assert output.outputs[0].reasoning
        assert not output.text
