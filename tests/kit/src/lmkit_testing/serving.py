"""Servers for tests: a scripted engine that says exactly what it is told, and a real socket in this event loop.

    llm = scripted("<think>two plus two</think>4")
    async with listening(llm) as url: ...

The tokenizer has one token per byte, so texts and token ids say the same thing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from lmkit.api import (
    Checkpoint,
    Choice,
    EngineDead,
    ErrorInfo,
    FinishReason,
    ParserFormat,
    Pooled,
    ResolvedPlan,
    SchedStats,
    TokenEvent,
    TokenLogprob,
)
from lmkit.config import EngineConfig, from_options
from lmkit.engine.client import BaseClient, EngineClient, ProcessClient
from lmkit.engine.messages import Abort, AskStats, Command, EngineFacts, EngineStats, Events, Stats, Submit
from lmkit.plugins.host import PluginHost
from lmkit.plugins.resolve import resolve
from lmkit.text.side import TextSide
from lmkit_formats import JsonCalls, ReasoningFormat, ToolFormat
from lmkit_http.dialect import Dialect
from lmkit_http.settings import ServerSettings
from lmkit_python.supervised import Supervised
from lmkit_tokenizer_json.render import Renderer
from lmkit_tokenizer_json.tokenizer import JsonTokenizer
from msgspec.structs import replace
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lmkit_testing.engines import HASH_FACTORY, hash_config, hash_engine, no_checkpoint, no_plan
from lmkit_testing.inproc import InprocClient

CALLS = ToolFormat("calls", JsonCalls(), open=("<tool_call>",), close=("</tool_call>",))
THINK = ReasoningFormat("think", ("<think>",), ("</think>",))
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function | tojson }}{% endfor %}<|end|>{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
END = 256  # the token that ends an answer


def byte_tokenizer(chat_template: str | None = TEMPLATE) -> JsonTokenizer:
    """One token per byte, and <|end|> (id 256)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|end|>"])
    return JsonTokenizer(raw, eos_token="<|end|>", special_tokens={}, chat_template=chat_template)


def text_plan() -> ResolvedPlan:
    """A plan that chooses what reads tokenizer.json and what renders templates, and nothing else."""
    dist, hooks, apart = "lmkit-tokenizer-json", "lmkit_tokenizer_json.hooks", "lmkit_tokenizer_json.apart"
    tokenizer = Choice("tokenizer", "", "json", f"{apart}:open_tokenizer", dist, "0.1.0", hooks)
    renderer = Choice("renderer", "", "jinja", f"{apart}:open_renderer", dist, "0.1.0", hooks)
    return replace(no_plan(), choices=(tokenizer, renderer))


def text_side(
    tools: ToolFormat | ParserFormat | None = CALLS, reasoning: ReasoningFormat | ParserFormat | None = THINK
) -> TextSide:
    tokenizer = byte_tokenizer()
    return TextSide(tokenizer, Renderer(tokenizer.chat_template or "", {}), tools, reasoning, {})


def open_text(checkpoint: Checkpoint, resolved: ResolvedPlan, config: EngineConfig) -> TextSide:
    """The same, in a process that is told by name how it gets one."""
    return text_side()


class ScriptedClient(BaseClient):
    """Every request gets the next script (token ids) in events of `per_event` tokens, until END or max_tokens."""

    def __init__(
        self, scripts: Sequence[Sequence[int]], facts: EngineFacts, per_event: int = 1, delay: float = 0.0
    ) -> None:
        super().__init__()
        self.state = "ready"
        self.facts = facts
        self.requests: list[Any] = []  # every EngineRequest, in order
        self.aborted: list[str] = []
        self._scripts = [list(s) for s in scripts]
        self._per_event, self._delay = per_event, delay
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Ready from the beginning."""

    def _send(self, command: Command) -> None:
        if isinstance(command, Submit):
            number = len(self.requests)
            self.requests.append(command.request)
            script = self._scripts[number % len(self._scripts)]
            task = asyncio.get_running_loop().create_task(self._play(command.request, script))
            self._tasks[command.request.id] = task
        elif isinstance(command, Abort):
            self.aborted += command.ids
            for id in command.ids:
                self._tasks.pop(id).cancel()
        elif isinstance(command, AskStats):
            stats = SchedStats(num_running=self.num_streams, num_blocks=10, num_free_blocks=10)
            self._receive(Stats(command.number, EngineStats(stats)))

    async def _play(self, request: Any, script: list[int]) -> None:
        if request.pooling is not None:  # zeros
            size = self.facts.pooler.size if self.facts.pooler is not None else 1
            await asyncio.sleep(self._delay)
            self._tasks.pop(request.id, None)
            self._receive(Events([TokenEvent(request.id, finish="stop", pooled=Pooled(bytes(4 * size), (size,)))]))
            return
        script = script[: request.params.max_tokens]
        prompt = request.token_ids[1:] if request.params.prompt_logprobs is not None else []
        for at in range(0, len(script), self._per_event):
            await asyncio.sleep(self._delay)
            tokens = script[at : at + self._per_event]
            last = at + self._per_event >= len(script)
            stop = END if last and tokens[-1] == END and not request.params.ignore_eos else None
            finish: FinishReason | None = ("stop" if stop is not None else "length") if last else None
            shown = self._logprobs(tokens, request.params.logprobs)
            before = self._logprobs(prompt, request.params.prompt_logprobs) if at == 0 else []
            event = TokenEvent(request.id, tokens, finish, stop, shown, before, 0 if at == 0 else None)
            if last:
                self._tasks.pop(request.id, None)
            self._receive(Events([event]))

    @staticmethod
    def _logprobs(tokens: list[int], num: int | None) -> list[TokenLogprob]:
        if num is None:
            return []
        return [TokenLogprob(t, -0.25, 1, [((t + i) % 256, -0.25 - i) for i in range(num)]) for t in tokens]

    def kill(self) -> None:
        """The engine dies now."""
        self._die(EngineDead("the engine process was killed").info())

    def fail_next(self, error: ErrorInfo) -> None:
        """Every running request ends with an error."""
        for id in list(self._streams):
            self._tasks.pop(id).cancel()
            self._receive(Events([TokenEvent(id, finish="error", error=error)]))

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()


@dataclass
class ServedLLM:
    """What build_app needs."""

    client: EngineClient
    text: TextSide
    resolved: Any = None

    @property
    def facts(self) -> EngineFacts:
        return self.client.facts


def scripted(
    *answers: str, per_event: int = 1, delay: float = 0.0, max_length: int = 4096, end: bool = True
) -> ServedLLM:
    """A model that answers its n-th request with the n-th text (and then from the first again)."""
    side = text_side()
    scripts = [[*side.tokenizer.encode(a, add_special=False), *([END] if end else [])] for a in answers]
    facts = EngineFacts("scripted", max_length, 1 << 20, 257)
    return ServedLLM(ScriptedClient(scripts, facts, per_event, delay), side, no_plan())


@asynccontextmanager
async def hashed(config: EngineConfig | None = None, **options: object) -> AsyncIterator[ServedLLM]:
    """A whole engine on the hash-model, in a thread: real scheduling, blocks and aborts, no torch."""
    config = hash_config(config, vocab_size=END + 1, **options)
    client = InprocClient(lambda progress: hash_engine(config, no_plan(), no_checkpoint(), progress))
    await client.start()
    try:
        yield ServedLLM(client, text_side(), no_plan())
    finally:
        await client.close()


@asynccontextmanager
async def supervised(config: EngineConfig | None = None, **options: object) -> AsyncIterator[ServedLLM]:
    """The same in a process that may be killed: another one takes its place."""
    config = hash_config(config, vocab_size=END + 1, **options)
    make = partial(ProcessClient, config, no_plan(), no_checkpoint(), factory=HASH_FACTORY)
    client = Supervised(make, pause=0.05)
    await client.start()
    try:
        yield ServedLLM(client, text_side(), no_plan())
    finally:
        await client.close()


@asynccontextmanager
async def real(model: str, **options: object) -> AsyncIterator[ServedLLM]:
    """A checkpoint with the installed plugins, its engine in a thread. `options` as for LLM."""
    from lmkit.engine.build import build_engine

    config = from_options({"model": model, "kv_memory": "8MiB", **options})
    host = PluginHost()
    resolved, checkpoint, _ = resolve(config, host)
    client = InprocClient(lambda progress: build_engine(config, resolved, checkpoint, progress))
    await client.start()
    try:
        yield ServedLLM(client, TextSide.open(checkpoint, resolved, config), resolved)
    finally:
        await client.close()


@asynccontextmanager
async def listening(
    llm: ServedLLM,
    settings: ServerSettings | None = None,
    on_app: Callable[[Any], None] | None = None,
    dialects: Sequence[Dialect] | None = None,
) -> AsyncIterator[str]:
    """The server on a free port of 127.0.0.1; yields its address. `dialects`: None = those that are installed."""
    import uvicorn
    from lmkit_http.app import build_app
    from lmkit_http.run import bind, transport

    settings = settings or ServerSettings(port=0)
    app = build_app(llm, settings, dialects)
    if on_app is not None:
        on_app(app)
    sock = bind(settings)
    server = uvicorn.Server(transport(app, settings))
    serving = asyncio.create_task(server._serve([sock]))
    try:
        while not server.started:
            await asyncio.sleep(0.005)
        async with app.state.backend.background:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        await serving
        sock.close()
