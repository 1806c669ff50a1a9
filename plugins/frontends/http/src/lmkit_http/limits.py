"""Limits that follow from the model: how large a body can be of use, how many requests may wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmkit_http.strict import MAX_VALUES

if TYPE_CHECKING:
    from lmkit.engine.messages import EngineFacts

    from lmkit_http.settings import ServerSettings

_BODY = 4 << 20  # bytes: for schemas, tools and what the template leaves out
MOST_BODY = 16 << 20  # of any model
_PER_TOKEN = 8  # bytes of JSON
_QUEUE = 256  # requests
_TEXTS = 2048  # of a request for vectors or scores
_ROUNDS = 4  # times the rows of a step: those at the end of the queue wait for so many requests before them


def body_limit(facts: EngineFacts, settings: ServerSettings) -> int:
    """Bytes of a body: as many texts as may be sent at once, each as long as the model reads."""
    if settings.max_body is not None:
        return settings.max_body
    return min(MOST_BODY, _BODY + _num_texts(facts, settings) * facts.max_length * _PER_TOKEN)


def values_limit(facts: EngineFacts, settings: ServerSettings) -> int:
    """Values of all lists and objects of a body: as many token ids as may be sent at once, and what goes with them."""
    return MAX_VALUES + _num_texts(facts, settings) * facts.max_length


def _num_texts(facts: EngineFacts, settings: ServerSettings) -> int:
    return settings.max_choices if facts.pooler is None else _TEXTS


def queue_limit(facts: EngineFacts) -> int:
    """Requests that may run and wait together."""
    return facts.max_rows + (facts.max_waiting or max(_QUEUE, _ROUNDS * facts.max_rows))
