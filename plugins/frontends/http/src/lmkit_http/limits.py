"""Limits that follow from the model: how large a body can be of use, how many requests may wait, how long a text is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from lmkit.api import InvalidParam, RequestTooLarge
from lmkit.text.measure import longer_than

from lmkit_http.pooling_schema import MAX_INPUTS
from lmkit_http.schema import MAX_VALUES

if TYPE_CHECKING:
    from lmkit.api import Tokenizer
    from lmkit.engine.messages import EngineFacts

    from lmkit_http.settings import ServerSettings

_BODY = 4 << 20  # bytes: for schemas, tools and what the template leaves out
_MOST_BODY = 16 << 20
_PER_TOKEN = 8  # bytes of JSON
_QUEUE = 256  # requests
TEMPLATE_SLACK = 2
_ROUNDS = 4  # times the rows of a step: those at the end of the queue wait for so many requests before them


def body_limit(facts: EngineFacts, settings: ServerSettings) -> int:
    """Bytes of a body: as many texts as may be sent at once, each as long as the model reads."""
    if settings.max_body is not None:
        return settings.max_body
    return min(_MOST_BODY, _BODY + _num_texts(facts, settings) * facts.max_length * _PER_TOKEN)


def values_limit(facts: EngineFacts, settings: ServerSettings) -> int:
    """Values of all lists and objects of a body: as many token ids as may be sent at once, and what goes with them."""
    return MAX_VALUES + _num_texts(facts, settings) * facts.max_length


def _num_texts(facts: EngineFacts, settings: ServerSettings) -> int:
    return settings.max_choices if facts.pooler is None else MAX_INPUTS


def queue_limit(facts: EngineFacts) -> int:
    """Requests that may run and wait together."""
    return facts.max_rows + (facts.max_waiting or max(_QUEUE, _ROUNDS * facts.max_rows))


def context_limit(facts: EngineFacts) -> int:
    """Tokens of a prompt with its output."""
    return min(facts.max_length, facts.num_kv_tokens or facts.max_length)


def check_prompt(
    token_ids: Sequence[int], facts: EngineFacts, max_tokens: int | None, default: int | None = None
) -> int:
    """The number of tokens that may be generated. Raises RequestError: an over-long prompt is never truncated.

    `default`: for requests without max_tokens; None = all that fits.
    """
    limit = context_limit(facts)
    num = len(token_ids)
    if num == 0:
        raise InvalidParam("prompt", "", "at least one token")
    if facts.vocab_size and (worst := max(token_ids)) >= facts.vocab_size:
        raise InvalidParam("prompt", worst, f"token ids below {facts.vocab_size}")
    room = limit - num
    if room < 1:
        raise ContextTooLong(
            num, 1, limit, f"the prompt has {num} tokens, and prompt and output together may have {limit}"
        )
    if max_tokens is not None and max_tokens > room:
        message = (
            f"the prompt has {num} tokens and max_tokens is {max_tokens}, together {num + max_tokens}; "
            f"the limit is {limit}"
        )
        raise ContextTooLong(num, max_tokens, limit, message)
    return max_tokens if max_tokens is not None else min(room, default or room)


class ContextTooLong(RequestTooLarge):
    code = "context_length_exceeded"

    def __init__(self, num_prompt: int, max_tokens: int, limit: int, message: str) -> None:
        super().__init__(
            "prompt", num_prompt + max_tokens, limit, message, fix="shorten the prompt or lower max_tokens"
        )


def check_texts(tokenizer: Tokenizer, texts: Iterable[str], facts: EngineFacts, slack: int = 1) -> None:
    """Refuses texts that are far too long, before they take the time and the memory of being tokenized.

    `slack`: times the context that they may have, where a template leaves some of them out. Raises ContextTooLong.
    """
    limit = context_limit(facts)
    if longer_than(tokenizer, texts, slack * limit):
        num = 2 * slack * limit
        raise ContextTooLong(num, 1, limit, f"the prompt has more than {num} tokens; the limit is {limit}")


def strings(value: object) -> Iterator[str]:
    """Every text in a JSON value, names too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, member in value.items():
            yield name
            yield from strings(member)
    elif isinstance(value, Sequence):
        for member in value:
            yield from strings(member)
