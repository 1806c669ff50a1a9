"""Measure a checkpoint's skills on held-out chats with greedy decoding, and print a table.

Every number, name, list, phrase and question that decides an answer is one that training never saw.
"""

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from train.data import SYSTEM_PROMPTS, Chat, Mix, Renderer, exchange_messages, make_chat, system_prompt
from train.skills import PLAIN_SKILLS, Exchange
from train.tools import without_tool

CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
SKILLS = ["tools", "no_tool", *PLAIN_SKILLS]
MAX_NEW_TOKENS = 192


@dataclass(frozen=True)
class Item:
    """One prompt and the test that its reply must pass."""

    row: str  # the row of the table that it counts for
    prompt: str
    expected: str  # for the report of failures
    passes: Callable[[str], bool]


def final_text(reply: str) -> str:
    """What follows the reasoning."""
    return reply.split("</think>")[-1].strip("\n")


def same_number(expected: str) -> Callable[[str], bool]:
    """The reply's last number is the expected answer's last number."""

    def last(text: str) -> str:
        return (re.findall(r"(?<!\d )-?\d+", text) or [""])[-1]

    return lambda reply: last(final_text(reply)) == last(expected)


def same_keys(expected: str) -> Callable[[str], bool]:
    """The reply is a JSON object with exactly the expected keys."""

    def passes(reply: str) -> bool:
        try:
            found = json.loads(final_text(reply))
        except json.JSONDecodeError:
            return False
        return isinstance(found, dict) and list(found) == list(json.loads(expected))

    return passes


def same_calls(exchange: Exchange) -> Callable[[str], bool]:
    """The reply consists of the expected calls: names and arguments, types included."""
    expected = [json.dumps({"name": c.name, "arguments": c.arguments}, sort_keys=True) for c in exchange.calls]

    def passes(reply: str) -> bool:
        try:
            found = [json.dumps(json.loads(text), sort_keys=True) for text in CALL.findall(reply)]
        except json.JSONDecodeError:
            return False
        return found == expected and not CALL.sub("", final_text(reply)).strip()

    return passes


def one_of(accepted: tuple[str, ...]) -> Callable[[str], bool]:
    """The reply is literally one of the accepted answers."""
    return lambda reply: final_text(reply) in accepted


def items_of(chat: Chat, renderer: Renderer) -> list[Item]:
    """The items that a chat's last exchange yields; the exchanges before it are context."""
    exchange = chat.exchanges[-1]
    messages = [{"role": "system", "content": chat.system}] if chat.system else []
    for earlier in chat.exchanges[:-1]:
        messages += exchange_messages(earlier, thinking=False)
    last = exchange_messages(exchange, chat.thinking)
    suffix = ", thinking" if chat.thinking else ""

    def item(row: str, messages: list[dict], expected: str, passes: Callable[[str], bool]) -> Item:
        return Item(row + suffix, renderer.prompt(messages, chat.tools, chat.thinking), expected, passes)

    asked = [*messages, last[0]]
    if exchange.calls:
        answered = [*messages, *last[:-1]]
        calls = "; ".join(f"{c.name} {c.arguments}" for c in exchange.calls)
        return [
            item("tool call: name and arguments", asked, calls, same_calls(exchange)),
            item("answer from the tool's result", answered, exchange.answer, one_of((exchange.answer,))),
        ]
    accepted = one_of(exchange.accepted or (exchange.answer,))
    if exchange.skill == "arithmetic":
        return [item("sums and differences", asked, exchange.answer, same_number(exchange.answer))]
    if exchange.skill == "json":
        return [
            item("JSON: valid, exactly the keys", asked, exchange.answer, same_keys(exchange.answer)),
            item("JSON: values too", asked, exchange.answer, accepted),
        ]
    return [item(exchange.skill, asked, exchange.answer, accepted)]


def plain_chat(skill: str, rng: Random, thinking: bool) -> Chat:
    """A chat whose last exchange is of one skill; half of the chats have others before it."""
    if skill == "no_tool":
        return Chat((without_tool(rng, True, []),), (), rng.choice(SYSTEM_PROMPTS[:3]), thinking)
    context = make_chat(rng, True, Mix(tools=0.0)).exchanges[1:] if rng.random() < 0.5 else ()
    return Chat((*context, PLAIN_SKILLS[skill](rng, True)), (), system_prompt(rng, True), thinking)


def make_items(skills: list[str], num_chats: int, seed: int) -> list[Item]:
    """Held-out items of `num_chats` chats per skill, about half of them with thinking on."""
    renderer, items = Renderer(), []
    tools = Mix(tools=1.0, thinking=0.5, more_when_thinking=Mix().more_exchanges)
    for skill in skills:
        rng = Random(f"{seed} {skill}")
        for index in range(num_chats):
            chat = make_chat(rng, True, tools) if skill == "tools" else plain_chat(skill, rng, index % 2 == 1)
            items += items_of(chat, renderer)
    return items


def generate(model: AutoModelForCausalLM, tokenizer: AutoTokenizer, prompts: list[str], batch_size: int) -> list[str]:
    """Greedy replies, special tokens removed, in the order of the prompts."""
    replies = [""] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for begin in tqdm(range(0, len(order), batch_size), unit="batch"):
        indices = order[begin : begin + batch_size]
        inputs = tokenizer([prompts[i] for i in indices], return_tensors="pt", padding=True, padding_side="left")
        inputs.pop("token_type_ids", None)
        with torch.inference_mode():
            output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        for index, text in zip(indices, texts, strict=True):
            replies[index] = text
    return replies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="checkpoint directory")
    parser.add_argument("--skills", nargs="+", choices=SKILLS, default=SKILLS, help="skills to measure")
    parser.add_argument("--chats", type=int, default=400, help="chats per skill")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="type to compute in")
    parser.add_argument("--failures", type=int, default=0, help="failures to show per row")
    parser.add_argument("--seed", type=int, default=1234)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.checkpoint)
    model = AutoModelForCausalLM.from_pretrained(arguments.checkpoint, dtype=getattr(torch, arguments.dtype)).eval()
    items = make_items(arguments.skills, arguments.chats, arguments.seed)
    replies = generate(model, tokenizer, [item.prompt for item in items], arguments.batch_size)
    results: dict[str, list[bool]] = {}
    shown: dict[str, int] = {}
    for item, reply in zip(items, replies, strict=True):
        passed = item.passes(reply)
        results.setdefault(item.row, []).append(passed)
        if not passed and shown.setdefault(item.row, 0) < arguments.failures:
            shown[item.row] += 1
            question = item.prompt.rsplit("<|im_start|>user\n", 1)[1].split("<|im_end|>")[0]
            print(f"[{item.row}] {question!r}\n    expected {item.expected!r}\n    got      {reply!r}")
    print("| skill | correct | of | % |\n|---|---|---|---|")
    for row in sorted(results):
        passed = results[row]
        print(f"| {row} | {sum(passed)} | {len(passed)} | {100 * sum(passed) / len(passed):.1f} |")


if __name__ == "__main__":
    main()
