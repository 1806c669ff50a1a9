"""The generated chats: reproducible, and free of what evaluation asks."""

import json
import re
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmkit_model_demo.hooks import DIRECTORY
from tokenizers import Tokenizer
from train import words
from train.data import Batch, Mix, Renderer, batches, make_chat
from train.skills import PLAIN_SKILLS, add_by_column, subtract_by_column
from train.tools import MAKERS, definitions

NUMBERS = st.integers(0, 99)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))


def test_same_seed_same_chats() -> None:
    first, second = ([make_chat(rng, False, Mix()) for _ in range(50)] for rng in (Random(3), Random(3)))
    assert [chat.messages() for chat in first] == [chat.messages() for chat in second]
    assert [chat.tools for chat in first] == [chat.tools for chat in second]


def test_pairs_of_numbers_are_either_trained_or_held_out() -> None:
    def pairs(held_out: bool) -> set[str]:
        rng = Random(1)
        answers = [PLAIN_SKILLS["arithmetic"](rng, held_out).answer for _ in range(3000)]
        return {answer.split(" =")[0] for answer in answers}

    trained, held_out = pairs(False), pairs(True)
    assert not trained & held_out
    assert len(held_out) > 800


@pytest.mark.parametrize("make", [words.city, words.name, words.phrase, words.email, words.number, words.clock_time])
def test_values_are_either_trained_or_held_out(make) -> None:
    def values(held_out: bool) -> set[str]:
        rng = Random(2)
        return {str(make(rng, held_out)).lower() for _ in range(500)}

    assert not values(False) & values(True)


def test_questions_are_either_trained_or_held_out() -> None:
    def questions(held_out: bool) -> set[str]:
        rng = Random(4)
        users = [PLAIN_SKILLS["lmkit"](rng, held_out).user for _ in range(3000)]
        return {user.lower().rstrip(" ?.!") for user in users}

    trained, held_out = questions(False), questions(True)
    assert not trained & held_out
    assert len(held_out) > 100


@given(NUMBERS, NUMBERS)
def test_written_steps_are_true(a: int, b: int) -> None:
    for steps, result in ((add_by_column(a, b), a + b), (subtract_by_column(a, b), a - b)):
        assert steps.endswith((f"So {result}.", f"The sign is minus: {result}."))
        for left, sign, right, rest, value in re.findall(r"(\d+) ([+-]) (\d+)(?: [+-] (\d))? = (\d+)", steps):
            second = int(right) + int(rest or 0)
            assert int(left) + (second if sign == "+" else -second) == int(value)


@pytest.mark.parametrize("seed", range(20))
def test_json_answers_have_the_asked_keys(seed: int) -> None:
    exchange = PLAIN_SKILLS["json"](Random(seed), False)
    assert all(key in exchange.user for key in json.loads(exchange.answer))


@pytest.mark.parametrize("maker", [maker for maker, _ in MAKERS])
@pytest.mark.parametrize("seed", range(10))
def test_calls_fit_the_definitions(maker, seed: int) -> None:
    rng = Random(seed)
    tool = maker(rng)
    function = definitions([tool], rng)[0]["function"]
    call = tool.use(rng, False, tool).calls[0]
    assert call.name == function["name"]
    assert set(function["parameters"]["required"]) <= set(call.arguments) <= set(function["parameters"]["properties"])
    for name, value in call.arguments.items():
        assert isinstance(value, str) == (function["parameters"]["properties"][name]["type"] == "string")


def test_rows_hold_whole_chats(tokenizer: Tokenizer) -> None:
    batch = next(batches(tokenizer, Mix(), seed=1, num_rows=4, length=512))
    starts = (batch.positions == 0) & (batch.segments > 0)
    assert (batch.tokens[starts] == tokenizer.token_to_id("<|im_start|>")).all()
    assert (batch.segments > 0).mean() > 0.9
    inside = np.diff(batch.segments, axis=1) == 0
    assert (batch.targets[:, :-1][inside] == batch.tokens[:, 1:][inside]).all()


def test_only_replies_count_in_full(tokenizer: Tokenizer) -> None:
    batch = next(batches(tokenizer, Mix(tools=0.0, thinking=0.0), seed=1, num_rows=1, length=256))
    row = batch.targets[0][(batch.weights[0] == 1.0)]
    text = tokenizer.decode(list(row), skip_special_tokens=False)
    assert "<|im_start|>" not in text
    assert "<think>" not in text
    assert text.count("<|im_end|>") == num_replies(batch, tokenizer)


def num_replies(batch: Batch, tokenizer: Tokenizer) -> int:
    """Number of replies in the batch's first row."""
    text = tokenizer.decode(list(batch.tokens[0]), skip_special_tokens=False)
    return text.count("<|im_start|>assistant")


def test_template_is_the_one_in_the_checkpoint() -> None:
    config = json.loads((DIRECTORY / "tokenizer_config.json").read_text())
    assert config["chat_template"] == Renderer.source()
