"""Models behind the real server: the demo checkpoint, one that takes any allowed byte at random, and one that says
what it is told as far as it is allowed to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx
import pytest
from lmkit import AsyncLLM
from lmkit.api import Choice, SchedLimits
from lmkit.config import from_options
from lmkit.engine.core import EngineCore
from lmkit.engine.intake import Intake
from lmkit.engine.loop import Engine
from lmkit.engine.messages import EngineFacts
from lmkit.scheduling.scheduler import Scheduler
from lmkit.text.side import TextSide, vocabulary
from lmkit_structured_output_masks.compiler import Compiler
from lmkit_structured_output_masks.output import ConstrainedOutput
from lmkit_testing.engines import Fcfs
from lmkit_testing.hash_model import HashExecutor, hash_kv
from lmkit_testing.inproc import InprocClient
from lmkit_testing.serving import END, ServedLLM, byte_tokenizer, listening, text_side
from lmkit_tokenizer_json.render import Renderer

LLGUIDANCE = Choice(
    "grammar", "grammar", "llguidance", "lmkit_grammar_llguidance.backend:LlGuidance", "lmkit-grammar-llguidance", "",
    "lmkit_grammar_llguidance.hooks",
)  # fmt: skip
# with thinking "on" the prompt opens it; with "off" it closes it; without the switch the model may do as it likes
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined %}<think>\n"
    "{% if not enable_thinking %}</think>\n{% endif %}{% endif %}{% endif %}"
)
Model = Callable[[], AbstractAsyncContextManager[httpx.AsyncClient]]


def byte_engine(make: Callable[..., HashExecutor] = HashExecutor, depth: int = 1) -> Engine:
    """The hash-model with a vocabulary of bytes: its next token is any that the constraint allows."""
    tokenizer = byte_tokenizer()
    kv = hash_kv(4096, 16)
    executor = make(kv, depth=depth, vocab_size=END + 1, eos_token_ids=(END,), masks_stops=False)
    lookahead = 8 if depth == 1 else 0
    limits = SchedLimits(
        max_tokens=512, max_rows=16, max_length=4096, depth=depth, eos_token_ids=(END,), lookahead=lookahead
    )
    compiler = Compiler([LLGUIDANCE], lambda: vocabulary(tokenizer, (END,), END + 1))
    output = ConstrainedOutput(compiler, limits.max_rows if lookahead else 0)
    core = EngineCore(Scheduler(limits, kv, Fcfs()), executor, Intake(END + 1, 4096, grammars=output))
    return Engine(core, EngineFacts("random", 4096, 1 << 16, END + 1, eos_token_ids=(END,)), output.close)


class ScriptedExecutor(HashExecutor):
    """Says script number `seed` of the request, END behind it, and where that is not allowed any allowed token."""

    scripts: Sequence[Sequence[int]] = ()

    def _draw(self, row: Any, work: Any, allowed: Sequence[int]) -> list[int]:
        script, at = self.scripts[row.params.seed], 0
        for token in row.tokens[row.num_prompt_tokens :]:
            at += at < len(script) and token == script[at]
        drawn: list[int] = []
        for j in range(len(work.drafts) + 1):
            token = script[at] if at < len(script) else END
            at += 1
            if allowed and not allowed[j] >> token & 1:
                at -= 1
                token = next(t % (END + 1) for t in range(97, 97 + END + 1) if allowed[j] >> t % (END + 1) & 1)
            drawn.append(token)
            if j < len(work.drafts) and work.drafts[j] != token:
                break
        return drawn


@asynccontextmanager
async def byte_model(engine: Callable[[], Engine]) -> AsyncIterator[httpx.AsyncClient]:
    side = text_side()
    side = TextSide(side.tokenizer, Renderer(TEMPLATE, {}), side.tool_format, side.reasoning_format, {})
    client = InprocClient(lambda progress: engine())
    await client.start()
    try:
        async with listening(ServedLLM(client, side)) as url, httpx.AsyncClient(base_url=url, timeout=300) as http:
            yield http
    finally:
        await client.close()


def random_model() -> AbstractAsyncContextManager[httpx.AsyncClient]:
    return byte_model(lambda: byte_engine(depth=2))


def scripted_model(scripts: Sequence[str], depth: int = 1) -> AbstractAsyncContextManager[httpx.AsyncClient]:
    """Its request with seed n is answered with script n."""
    ids = [byte_tokenizer().encode(script, add_special=False) for script in scripts]
    told = type("Told", (ScriptedExecutor,), {"scripts": ids})
    return byte_model(lambda: byte_engine(told, depth))


@asynccontextmanager
async def demo_model() -> AsyncIterator[httpx.AsyncClient]:
    llm: Any = await AsyncLLM.start(from_options({"model": "demo"}))
    try:
        async with listening(llm) as url, httpx.AsyncClient(base_url=url, timeout=300) as http:
            yield http
    finally:
        await llm.close()


@pytest.fixture(params=["random", "demo"])
def model(request: pytest.FixtureRequest) -> Model:
    return random_model if request.param == "random" else demo_model
