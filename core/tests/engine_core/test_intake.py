"""What enters the engine: everything else is refused by name, with both numbers where there are two."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from lmkit.api import EngineRequest, Grammar, InvalidParam, MediaItem, RequestTooLarge, SamplingParams, Thinking
from lmkit.engine.intake import Intake, NoStructuredOutput
from lmkit.scheduling.request import Request
from lmkit_testing.strategies import engine_requests


@dataclass
class Options:
    strength: float = 1.0

    def __post_init__(self) -> None:
        if self.strength < 0:
            raise ValueError("strength is negative")


class Open:
    name = "adapter"

    def ready(self) -> bool:
        return True

    def error(self) -> None:
        return None


def request(tokens=(1, 2, 3), **changes) -> EngineRequest:
    params = {key: changes.pop(key) for key in list(changes) if key in SamplingParams.__slots__}
    return EngineRequest("r", list(tokens), SamplingParams(**{"max_tokens": 4, **params}), **changes)


INTAKE = Intake(vocab_size=100, max_length=20, fingerprint="m", kv_dtype="float32")


@given(engine_requests(max_prompt=4, max_tokens=16))
def test_valid_requests_keep_all_they_say(r):
    made = INTAKE.admit(r)
    assert (made.id, made.tokens, made.params) == (r.id, r.token_ids, r.params)
    assert (made.priority, made.arrival, made.num_prompt_tokens) == (r.priority, r.arrival, len(r.token_ids))
    assert made.tokens is not r.token_ids
    assert made.gates == []


def test_a_prompt_must_have_tokens():
    with pytest.raises(InvalidParam, match="at least one token"):
        INTAKE.admit(request([]))


def test_a_long_prompt_is_refused_with_both_numbers():
    with pytest.raises(RequestTooLarge, match=r"25 tokens.*at most 20") as e:
        INTAKE.admit(request(range(25)))
    assert (e.value.field, e.value.value, e.value.limit) == ("prompt", 25, 20)
    with pytest.raises(RequestTooLarge):
        INTAKE.admit(request(range(20)))


def test_prompt_and_output_together():
    INTAKE.admit(request(range(10), max_tokens=10))
    with pytest.raises(RequestTooLarge, match=r"10 tokens and max_tokens is 11, together 21") as e:
        INTAKE.admit(request(range(10), max_tokens=11))
    assert (e.value.field, e.value.value, e.value.limit) == ("max_tokens", 11, 10)


def test_no_limit_means_what_is_left():
    assert INTAKE.admit(request(range(5), max_tokens=None)).params.max_tokens == 15


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"tokens": [1, 100]}, "prompt", 100),
        ({"tokens": [-1]}, "prompt", -1),
        ({"tokens": [1, 2.0]}, "prompt", 2.0),
        ({"tokens": [True]}, "prompt", True),
        ({"stop_token_ids": (3, 100)}, "stop_token_ids", 100),
        ({"logit_bias": ((200, 1.0),)}, "logit_bias", 200),
        ({"adapter": "red"}, "adapter", "red"),
        ({"extra": {"dry": 1}}, "extra.dry", 1),
        ({"media": [MediaItem("image", b"h", 0, 1)]}, "media", "image"),
        ({"grammar": Grammar("regex", "a+")}, "grammar", "regex"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_by_name(changes, field, value):
    with pytest.raises(InvalidParam) as e:
        INTAKE.admit(request(**changes))
    assert (e.value.field, e.value.value) == (field, value)
    assert e.value.info().status == 400


def test_known_adapters_bring_their_gate_and_their_own_blocks():
    gate = Open()
    intake = Intake(100, 20, adapters={"red": lambda: gate, "blue": lambda: None})
    red, blue, none = (intake.admit(request(adapter=name)) for name in ("red", "blue", None))
    assert (red.gates, blue.gates) == ([gate], [])
    assert len({red.root_hash, blue.root_hash, none.root_hash}) == 3
    with pytest.raises(InvalidParam, match="blue, red"):
        intake.admit(request(adapter="green"))


def test_root_hash_is_that_of_model_and_tenant():
    other_model = Intake(100, 20, fingerprint="m2", kv_dtype="float32")
    other_dtype = Intake(100, 20, fingerprint="m", kv_dtype="bfloat16")
    roots = [i.admit(request(cache_salt=s)).root_hash for i in (INTAKE, other_model, other_dtype) for s in (None, "t")]
    assert len(set(roots)) == 6


def test_extra_keys_are_validated_by_who_claims_them():
    intake = Intake(100, 20, processors={"dry": Options, "free": None})
    intake.admit(request(extra={"dry": {"strength": 2.0}, "free": 7}))
    for value in ({"strength": -1}, {"power": 1}, 3):
        with pytest.raises(InvalidParam, match=r"extra\.dry"):
            intake.admit(request(extra={"dry": value}))


def test_media_that_the_model_reads():
    item = MediaItem("image", b"h", 0, 2)
    assert Intake(100, 20, media=frozenset({"image"})).admit(request(media=[item])).media == (item,)


def test_a_grammar_backend_gives_the_gate():
    gate = Open()

    class Grammars(NoStructuredOutput):
        def gate(self, r: Request) -> Open:
            return gate

    intake = Intake(100, 20, grammars=Grammars())
    assert intake.admit(request(grammar=Grammar("regex", "a+"))).gates == [gate]
    assert intake.admit(request(thinking=Thinking(("</think>",), budget=3))).gates == [gate]
    assert intake.admit(request(thinking=Thinking(("</think>",)))).gates == []
