"""Random chats that teach the skills, and their packing into rows of tokens for training."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from train import words
from train.skills import PLAIN_SKILLS, Exchange
from train.tools import ARITHMETIC_USES, Tool, definitions, tool_exchange, toolbox, without_tool

TEMPLATE_PATH = Path(__file__).parent / "chat_template.jinja"
PROMPT_WEIGHT = 0.02  # of the loss on a prompt's tokens: predicting them helps copying
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant",
    "You are lmkit's demo model.",
    "You are a friendly bot. Answer in one sentence.",
    "Be brief.",
    "Answer the question.",
    "You are a helpful assistant. Use the tools if you need them.",
    "You are an expert in %s.",
    "Your name is %s. Be polite.",
    "Today is %s. You help people with %s.",
)
MAX_BACKGROUND_WORDS = 90  # of the meaningless text that some system prompts consist of


@dataclass(frozen=True)
class Mix:
    """How often each kind of chat and exchange is made; the weights need not add up to anything."""

    tools: float = 0.25  # share of chats with tools
    thinking: float = 0.35  # share of chats whose last reply thinks
    more_exchanges: float = 2.0  # mean length of a chat, roughly, after its first exchange
    more_when_thinking: float = 0.4  # likewise, if the last reply thinks
    plain: dict[str, float] = field(
        default_factory=lambda: {
            "arithmetic": 12.0,
            "lists": 14.0,
            "echo": 1.5,
            "counting": 1.0,
            "json": 4.0,
            "lmkit": 6.0,
            "unknown": 1.5,
            "no_tool": 0.3,
        }
    )


@dataclass(frozen=True)
class Chat:
    """One chat as a request would state it, replies included."""

    exchanges: tuple[Exchange, ...]
    tools: tuple[dict, ...]  # definitions in the OpenAI format
    system: str
    thinking: bool

    def messages(self) -> list[dict]:
        """The messages of the whole chat; only the last exchange's replies carry their reasoning."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for exchange in self.exchanges:
            messages += exchange_messages(exchange, self.thinking and exchange is self.exchanges[-1])
        return messages


def exchange_messages(exchange: Exchange, thinking: bool) -> list[dict]:
    """The user's message, the calls and results if any, and the answer."""
    reply = {"role": "assistant", "content": exchange.answer}
    messages: list[dict] = [{"role": "user", "content": exchange.user}]
    if not exchange.calls:
        return [*messages, reply | {"reasoning_content": exchange.thought} if thinking else reply]
    calls = [{"function": {"name": c.name, "arguments": c.arguments}} for c in exchange.calls]
    request = {"role": "assistant", "content": "", "tool_calls": calls}
    results = [{"role": "tool", "content": result} for result in exchange.results]
    if thinking:
        request["reasoning_content"] = exchange.thought
        reply["reasoning_content"] = exchange.result_thought
    return [*messages, request, *results, reply]


def system_prompt(rng: Random, held_out: bool) -> str:
    """A system prompt, or the empty string for none."""
    roll = rng.random()
    if roll < 0.6:
        return ""
    if roll < 0.65:
        return words.phrase(rng, held_out, MAX_BACKGROUND_WORDS).capitalize() + "."
    prompt = rng.choice(SYSTEM_PROMPTS)
    while "%s" in prompt:
        prompt = prompt.replace("%s", words.phrase(rng, held_out), 1)
    return prompt


def plain_exchange(rng: Random, held_out: bool, mix: Mix) -> Exchange:
    """An exchange without tools."""
    skill = rng.choices(list(mix.plain), list(mix.plain.values()))[0]
    return without_tool(rng, held_out, []) if skill == "no_tool" else PLAIN_SKILLS[skill](rng, held_out)


def make_chat(rng: Random, held_out: bool, mix: Mix) -> Chat:
    """A chat of one or more exchanges, with or without tools."""
    thinking = rng.random() < mix.thinking
    system = system_prompt(rng, held_out)
    more = mix.more_when_thinking if thinking else mix.more_exchanges
    rounds = range(1 + int(rng.expovariate(1 / more)))
    if rng.random() >= mix.tools:
        return Chat(tuple(plain_exchange(rng, held_out, mix) for _ in rounds), (), system, thinking)
    present = toolbox(rng)
    exchanges = tuple(exchange_near_tools(rng, held_out, mix, present) for _ in rounds)
    return Chat(exchanges, tuple(definitions(present, rng)), system, thinking)


def exchange_near_tools(rng: Random, held_out: bool, mix: Mix, present: list[Tool]) -> Exchange:
    """Mostly a request for a tool; sometimes one that needs none, or one that would need an absent tool."""
    roll = rng.random()
    if roll < 0.75:
        return tool_exchange(rng, held_out, present)
    if roll < 0.8:
        return without_tool(rng, held_out, present)
    while might_need_tool(exchange := plain_exchange(rng, held_out, mix), present):
        pass
    return exchange


def might_need_tool(exchange: Exchange, present: list[Tool]) -> bool:
    """Whether an exchange that is meant to need no tool could be a request for one at hand."""
    calculates = any(tool.use in ARITHMETIC_USES for tool in present)
    return exchange.skill == "no_tool" or (exchange.skill == "arithmetic" and calculates)


class Renderer:
    """Renders chats with the checkpoint's own template."""

    @staticmethod
    def source() -> str:
        """The template itself, as tokenizer_config.json states it."""
        return TEMPLATE_PATH.read_text()

    def __init__(self) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        self._template = environment.from_string(self.source())

    def prompt(self, messages: list[dict], tools: tuple[dict, ...] = (), thinking: bool = False) -> str:
        """The text that the model continues."""
        return self._template.render(
            messages=messages, tools=list(tools), enable_thinking=thinking, add_generation_prompt=True
        )

    def chat(self, chat: Chat) -> str:
        """The text of a whole chat."""
        return self._template.render(messages=chat.messages(), tools=list(chat.tools))


def loss_weights(tokens: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Each token's weight as a target: 1 in replies, 0 in the empty think block, which the template writes."""
    start, end = tokenizer.token_to_id("<|im_start|>"), tokenizer.token_to_id("<|im_end|>")
    header = tokenizer.encode("<|im_start|>assistant\n").ids
    empty = tokenizer.encode("<think>\n\n</think>\n\n").ids
    weights = np.full(len(tokens), PROMPT_WEIGHT, np.float32)
    for begin in np.flatnonzero(tokens == start):
        body = begin + len(header)
        if list(tokens[begin:body]) != header:
            continue
        stop = body + int(np.flatnonzero(tokens[body:] == end)[0]) + 1
        weights[body:stop] = 1.0
        if list(tokens[body : body + len(empty)]) == empty:
            weights[body : body + len(empty)] = 0.0
    return weights


@dataclass(frozen=True)
class Batch:
    """Packed rows, each array of shape (rows, tokens per row)."""

    tokens: np.ndarray  # inputs
    targets: np.ndarray  # the token after each input
    positions: np.ndarray  # within its chat
    segments: np.ndarray  # number of the chat in its row
    weights: np.ndarray  # of each target's loss


def pack(chats: list[tuple[np.ndarray, np.ndarray]], num_rows: int, length: int) -> tuple[Batch, list]:
    """Fill rows with whole chats, longest first, each where it fits; returns the chats left over too."""
    batch = Batch(
        tokens=np.zeros((num_rows, length), np.int64),
        targets=np.zeros((num_rows, length), np.int64),
        positions=np.zeros((num_rows, length), np.int64),
        segments=np.zeros((num_rows, length), np.int64),
        weights=np.zeros((num_rows, length), np.float32),
    )
    used, counts, left_over = [0] * num_rows, [0] * num_rows, []
    for tokens, weights in sorted(chats, key=lambda chat: -len(chat[0])):
        size = len(tokens) - 1
        row = next((r for r in range(num_rows) if used[r] + size <= length), None)
        if row is None:
            left_over.append((tokens, weights))
            continue
        span = slice(used[row], used[row] + size)
        used[row] += size
        counts[row] += 1
        batch.tokens[row, span] = tokens[:-1]
        batch.targets[row, span] = tokens[1:]
        batch.positions[row, span] = np.arange(size)
        batch.segments[row, span] = counts[row]
        batch.weights[row, span] = weights[1:]
    return batch, left_over


def batches(tokenizer: Tokenizer, mix: Mix, seed: int, num_rows: int, length: int) -> Iterator[Batch]:
    """Endless batches of training chats; chats longer than a row are dropped."""
    rng, renderer = Random(seed), Renderer()
    chats: list[tuple[np.ndarray, np.ndarray]] = []
    while True:
        while sum(len(tokens) for tokens, _ in chats) < num_rows * length * 1.3:
            texts = [renderer.chat(make_chat(rng, False, mix)) for _ in range(64)]
            encoded = [np.array(e.ids) for e in tokenizer.encode_batch(texts)]
            chats += [(tokens, loss_weights(tokens, tokenizer)) for tokens in encoded if len(tokens) <= length]
        rng.shuffle(chats)
        batch, chats = pack(chats, num_rows, length)
        yield batch
