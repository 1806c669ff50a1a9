"""How long a text may be for the model. The same for every front door, and asked before texts cost anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from lmkit.api import InvalidParam, RequestTooLarge
from lmkit.text.measure import longer_than

if TYPE_CHECKING:
    from lmkit.api import Tokenizer
    from lmkit.engine.messages import EngineFacts

TEMPLATE_SLACK = 2  # times the context that texts may have which a template leaves out


class ContextTooLong(RequestTooLarge):
    code = "context_length_exceeded"

    def __init__(self, num_prompt: int, max_tokens: int, limit: int, message: str) -> None:
        super().__init__(
            "prompt", num_prompt + max_tokens, limit, message, fix="shorten the prompt or lower max_tokens"
        )


def context_limit(facts: EngineFacts) -> int:
    """Tokens of a prompt with its output."""
    return min(facts.max_length, facts.num_kv_tokens or facts.max_length)


def check_prompt(
    token_ids: Sequence[int], facts: EngineFacts, max_tokens: int | None, default: int | None = None
) -> int:
    """The number of tokens that may be generated. Raises RequestError: an over-long prompt is never truncated.

    `default`: for asks without max_tokens; None = all that fits.
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
