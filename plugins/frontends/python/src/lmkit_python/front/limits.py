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
    """The prompt leaves no room for an output. Clients know the code and the wording, which are OpenAI's."""

    code = "context_length_exceeded"

    def __init__(self, num_prompt: int, limit: int, more: bool = False) -> None:
        """`more`: the prompt has more than `num_prompt` tokens, and nobody counted how many."""
        num = f"{'more than ' if more else ''}{num_prompt}"
        message = f"This model's maximum context length is {limit} tokens. However, your prompt has {num} tokens"
        super().__init__("prompt", num_prompt, limit, message, fix="please reduce the length of the prompt")


def context_limit(facts: EngineFacts) -> int:
    """Tokens of a prompt with its output."""
    return min(facts.max_length, facts.num_kv_tokens or facts.max_length)


def check_ids(token_ids: Sequence[int], facts: EngineFacts) -> None:
    """Raises InvalidParam for a prompt without tokens, or with one that the model does not have."""
    if not token_ids:
        raise InvalidParam("prompt", "", "at least one token")
    if facts.vocab_size and (worst := max(token_ids)) >= facts.vocab_size:
        raise InvalidParam("prompt", worst, f"token ids below {facts.vocab_size}")


def check_prompt(
    token_ids: Sequence[int], facts: EngineFacts, max_tokens: int | None, default: int | None = None
) -> int:
    """The number of tokens that may be generated: `max_tokens`, or as many as the prompt leaves room for.

    `default`: for asks without max_tokens; None = all that fits. Raises RequestError: an over-long prompt is never cut.
    """
    limit = context_limit(facts)
    num = len(token_ids)
    check_ids(token_ids, facts)
    room = limit - num
    if room < 1:
        raise ContextTooLong(num, limit)
    return min(room, max_tokens or default or room)


def check_texts(tokenizer: Tokenizer, texts: Iterable[str], facts: EngineFacts, slack: int = 1) -> None:
    """Refuses texts that are far too long, before they take the time and the memory of being tokenized.

    `slack`: times the context that they may have, where a template leaves some of them out. Raises ContextTooLong.
    """
    limit = context_limit(facts)
    if longer_than(tokenizer, texts, slack * limit):
        raise ContextTooLong(2 * slack * limit, limit, more=True)


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
