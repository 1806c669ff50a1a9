"""Two models behind the real server: the demo checkpoint, and one that takes any allowed byte at random."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx
import pytest
from lmkit import AsyncLLM
from lmkit.api import Choice, SchedLimits
from lmkit.config import from_options
from lmkit.engine.client import InprocClient
from lmkit.engine.compiler import Compiler
from lmkit.engine.core import EngineCore
from lmkit.engine.grammars import ConstrainedOutput
from lmkit.engine.intake import Intake
from lmkit.engine.loop import Engine
from lmkit.engine.messages import EngineFacts
from lmkit.scheduling.scheduler import Scheduler
from lmkit.testing.engines import Fcfs
from lmkit.testing.hash_model import HashExecutor, hash_kv
from lmkit.testing.serving import END, ServedLLM, byte_tokenizer, listening, text_side
from lmkit.text.render import Renderer
from lmkit.text.side import TextSide, vocabulary

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


def random_engine(depth: int = 1) -> Engine:
    """The hash-model with a vocabulary of bytes: its next token is any that the constraint allows."""
    tokenizer = byte_tokenizer()
    kv = hash_kv(4096, 16)
    executor = HashExecutor(kv, depth=depth, vocab_size=END + 1, eos_token_ids=(END,), masks_stops=False)
    limits = SchedLimits(max_tokens=512, max_rows=16, max_length=4096, depth=depth, eos_token_ids=(END,))
    compiler = Compiler([LLGUIDANCE], lambda: vocabulary(tokenizer, (END,), END + 1))
    output = ConstrainedOutput(compiler)
    core = EngineCore(Scheduler(limits, kv, Fcfs()), executor, Intake(END + 1, 4096, grammars=output))
    return Engine(core, EngineFacts("random", 4096, 1 << 16, END + 1, eos_token_ids=(END,)), output.close)


@asynccontextmanager
async def random_model() -> AsyncIterator[httpx.AsyncClient]:
    side = text_side()
    side = TextSide(side.tokenizer, Renderer(TEMPLATE, {}), side.tool_format, side.reasoning_format, {})
    client = InprocClient(lambda progress: random_engine(depth=2))
    await client.start()
    try:
        async with listening(ServedLLM(client, side)) as url, httpx.AsyncClient(base_url=url, timeout=300) as http:
            yield http
    finally:
        await client.close()


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
