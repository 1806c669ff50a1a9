"""LLM: generation in this process. AsyncLLM: an engine in its own process, for servers.

with LLM("demo") as llm:
    for output in llm.generate(["What is 2 + 3?", "Say hello"], SamplingParams(max_tokens=32)):
        print(output.text)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing, contextmanager
from functools import partial
from itertools import count
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from lmkit.api import (
    ConfigError,
    EngineBusy,
    Progress,
    SamplingParams,
    SchedStats,
    Text,
    TokenEvent,
    ToolChoice,
)
from lmkit.config import EngineConfig, from_options
from lmkit.config.environment import adopt_environment
from lmkit.engine.client import ProcessClient
from lmkit.engine.messages import SetProfile
from lmkit.engine.observers import Observers
from lmkit.engine.platform import platform_environment
from lmkit.engine.shared import SharedCore
from lmkit.engine.spawn import FACTORY, EngineProcess
from lmkit.plugins.host import PluginHost
from lmkit.plugins.resolve import resolve
from lmkit.text.side import TextSide
from lmkit.text.stream import Finish, OutputEvent

from lmkit_python.asks import one_ask
from lmkit_python.beam import BeamSearchOutput, BeamSearchParams, beam_asks, beam_output
from lmkit_python.elsewhere import check_options
from lmkit_python.front.ask import (
    Adapters,
    Ask,
    Messages,
    Params,
    PromptInput,
    Prompts,
    chat_asks,
    one_text_ask,
    text_asks,
)
from lmkit_python.front.message import Change
from lmkit_python.front.prepare import Turn, prepare_all
from lmkit_python.front.run import Generation, GenerationFailed, at_once, check_finish, check_taken, play
from lmkit_python.life import EngineLife, LifeCalls
from lmkit_python.outputs import RequestOutput, outputs_of
from lmkit_python.pooled import PoolingCalls
from lmkit_python.replicas import Replicas
from lmkit_python.supervised import RESTARTS, Supervised

if TYPE_CHECKING:
    from lmkit.api import Checkpoint, ModelInfo, ResolvedPlan
    from lmkit.engine.messages import EngineFacts


class LLM(PoolingCalls, LifeCalls):
    """A model in this process. Thread-safe: what several threads ask for runs in the same steps.

    Options are the fields of EngineConfig by name, as on the command line: LLM("demo", dtype="float32",
    kv_memory="1GiB", attention="torch"). Raises what prevents starting: ConfigError, SelectionError, CheckpointError,
    CapacityError, PluginError.
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        config: EngineConfig | None = None,
        host: PluginHost | None = None,
        progress: Progress | None = None,
        own_process: bool = False,
        **options: object,
    ) -> None:
        """`own_process`: this process exists for the model, so the platform may set up its environment (threads)."""
        self.config = _config("LLM", model, config, options)
        if self.config.parallel.dp > 1:
            raise ConfigError("LLM is one engine, in this process", fix="AsyncLLM or `lmkit serve` with dp, or no dp")
        host = host or PluginHost()
        self.resolved, self.checkpoint, self.info = resolve(self.config, host)
        if own_process:
            adopt_environment(platform_environment(self.config, self.resolved))
        with ThreadPoolExecutor(1) as beside:
            opening = beside.submit(TextSide.open, self.checkpoint, self.resolved, self.config)
            from lmkit.engine.build import build_engine, executor_of

            executor_of(self.resolved)  # to import what runs models takes as long
        self.text = opening.result()
        self._engine = build_engine(self.config, self.resolved, self.checkpoint, progress, self.text.tokenizer)
        self._observers = Observers(host, self.resolved, self.facts)
        self._observers.started()
        rows = self.facts.max_rows
        self.shared = SharedCore(self._engine.core, rows + min(rows, self.config.sched.queue))
        self._numbers = count(1)

    @property
    def facts(self) -> EngineFacts:
        return self._engine.facts

    def generate(
        self,
        prompts: Prompts,
        params: Params = None,
        *,
        n: int = 1,
        adapter: Adapters = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """One RequestOutput per prompt, in order; `n` outputs for each.

        `params`: one for all, or one per prompt. `progress`: a bar on stderr; default: when it is a terminal and
        there are several outputs. Raises RequestError when a prompt cannot be taken; then no output is returned.
        `adapter`: the name of a loaded one, or one name or None per prompt.
        """
        return outputs_of(self._run(text_asks(prompts, params, n, adapter), progress))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: Params = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        n: int = 1,
        tool_choice: str | ToolChoice = "auto",
        adapter: Adapters = None,
        template_options: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """One conversation ([{"role": ..., "content": ...}, ...]) or several. Reasoning and tool calls are parsed.

        `tools` as in the OpenAI API: [{"type": "function", "function": {...}}]; `tool_choice`: "auto", "none",
        "required", or ToolChoice("named", NAME). `params.grammar` constrains the answer after its reasoning. Raises
        RequestError.
        """
        asks = chat_asks(
            messages, params, tools=tools, n=n, tool_choice=tool_choice, adapter=adapter,
            template_options=template_options, continue_final_message=continue_final_message,
        )  # fmt: skip
        return outputs_of(self._run(asks, progress))

    def beam_search(
        self,
        prompts: Prompts,
        params: BeamSearchParams,
        *,
        adapter: Adapters = None,
        progress: bool | None = None,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` best outputs for each prompt. Needs the prefix cache to be quick: without it each token
        costs its whole prompt. Raises RequestError."""
        groups = self._run(beam_asks(prompts, params, adapter), progress)
        return [beam_output(group, params, self.text.tokenizer) for group in groups]

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template_options: Mapping[str, Any] | None = None,
    ) -> Iterator[OutputEvent]:
        """The answer as it is made: Text, Reasoning, Tool* events and a Finish. Leaving the iterator early aborts."""
        yield from self._stream(chat_asks([messages], params, tools=tools, template_options=template_options))

    def stream_text(self, prompt: PromptInput | Messages, params: SamplingParams | None = None) -> Iterator[str]:
        """The text of an answer as it is made; of a conversation, without reasoning and calls. Raises what ends it."""
        with closing(self.changes(one_ask(prompt, params))) as changes:
            for turn, change in changes:
                if change.content:
                    yield change.content
                check_finish(turn)

    def stream(self, prompt: PromptInput, params: SamplingParams | None = None) -> Iterator[OutputEvent]:
        """The completion as it is made: Text events and a Finish. Leaving the iterator early aborts."""
        yield from self._stream(one_text_ask(prompt, params))

    def changes(self, ask: Ask) -> Generator[tuple[Turn, Change], None, None]:
        """What each step adds to the messages of the ask's turns, until all have finished. Leaving it early aborts."""
        with closing(self._play(self.prepare([ask]))) as playing:
            for turn, events in playing:
                yield turn, turn.message.feed(events)

    def default_params(self, **changes: Any) -> SamplingParams:
        """The checkpoint's own sampling defaults (generation_config), changed as asked."""
        return SamplingParams(**{**(self.text.default_params or {}), **changes})

    def load_adapter(self, name: str, path: str) -> None:
        """A PEFT adapter under a name that `adapter=` takes. Needs enable_lora. Raises what prevents it."""
        with self.shared.alone():
            self._engine.core.adapters.load(name, str(path))

    def unload_adapter(self, name: str) -> None:
        with self.shared.alone():
            self._engine.core.adapters.unload(name)

    def stats(self) -> SchedStats:
        """What the scheduler counts, and what it holds now."""
        with self.shared.alone():
            return self._engine.core.stats()

    def start_profile(self, path: str, num_steps: int = 100) -> None:
        """Records the next steps by torch's profiler: PATH-rank0.json.gz, for Perfetto. Raises RequestError."""
        with self.shared.alone():
            self._engine.core.life.apply(SetProfile(str(path), num_steps))

    def stop_profile(self) -> None:
        """The file is there when it is whole: in a moment, or when this is closed. Raises RequestError."""
        with self.shared.alone():
            self._engine.core.life.apply(SetProfile("", 0))

    def prepare(self, asks: Sequence[Ask]) -> list[list[Turn]]:
        """The turns of each ask, ready to be played. Raises RequestError."""
        self.shared.require_open()
        if self.is_paused:  # a thread that waited could not be the one that resumes
            raise EngineBusy(f"the engine is {self.life}", fix="resume() it, or wake_up()")
        return prepare_all(self.text, self.facts, asks, f"llm-{next(self._numbers)}")

    def _run(self, asks: Sequence[Ask], progress: bool | None = None) -> list[list[Turn]]:
        """The turns of each ask, all of which have finished."""
        groups = self.prepare(asks)
        with _bar(sum(map(len, groups)), progress) as advance, closing(self._play(groups)) as playing:
            for turn, events in playing:
                turn.message.feed(events)
                if turn.stream.finished:
                    check_taken(turn)
                    advance(len(turn.stream.token_ids), True)
        return groups

    def _stream(self, asks: Sequence[Ask]) -> Iterator[OutputEvent]:
        with closing(self._play(self.prepare(asks))) as playing:
            for _, events in playing:
                yield from events

    def _play(self, groups: Sequence[Sequence[Turn]]) -> Generator[tuple[Turn, list[OutputEvent]], None, None]:
        turns = [turn for group in groups for turn in group]
        return play(self.shared, turns, self.watch(turns))

    def watch(self, turns: Sequence[Turn]) -> Callable[[TokenEvent], None] | None:
        """What shows the events of the engine to the plugins that watch their requests; None when none do."""
        requests = {turn.request.id: turn.request for turn in turns}
        watches = {id: watch for id, r in requests.items() if (watch := self._observers.watch(r))}
        return (lambda event: watches[event.id].see(event)) if watches else None

    def _read(self, asks: Sequence[Ask], read: Callable[[list[list[Turn]]], Any]) -> Any:
        return read(self._run(asks))

    def close(self) -> None:
        """Frees everything; what other threads are waiting for ends with EngineDead. Idempotent."""
        if self.shared.close():
            self._observers.stopping()
            self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncLLM(PoolingCalls):
    """An engine in its own process, with the text side beside it, on an event loop. Options are those of `LLM`.

    async with AsyncLLM("demo") as llm:
        print((await llm.generate("What is 2 + 3?"))[0].text)

    It starts with `async with`, with the first call, or with `ready`, and is closed by whoever made it.
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        config: EngineConfig | None = None,
        host: PluginHost | None = None,
        progress: Progress | None = None,
        resolution: tuple[ResolvedPlan, Checkpoint, ModelInfo] | None = None,
        factory: str = FACTORY,
        restarts: int = RESTARTS,
        process: EngineProcess | None = None,
        **options: object,
    ) -> None:
        """An engine that dies is replaced, see lmkit_python.supervised.Supervised; `restarts` = 0: it is not.

        `resolution`: what `lmkit.plugins.resolve` said, when the caller has asked it already, with `host`; `process`:
        the first engine's, when the caller has started it already and told it to build just that. Raises ConfigError.
        """
        self.config = _config("AsyncLLM", model, config, options)
        self._host, self._progress, self._resolution = host or PluginHost(), progress, resolution
        self._factory, self._restarts, self._process = factory, restarts, process
        self._parts: tuple[ResolvedPlan, Checkpoint, Supervised | Replicas, TextSide] | None = None
        self._life: EngineLife | None = None
        self._starting: asyncio.Future[None] | None = None

    @classmethod
    async def start(cls, config: EngineConfig, **more: Any) -> AsyncLLM:
        """One that is ready. `more`: as for AsyncLLM. Raises what prevents it."""
        return await cls(config=config, **more).__aenter__()

    async def ready(self) -> AsyncLLM:
        """Returns itself when the engine is ready. Raises what prevents it; then it is of no use any more."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
        await asyncio.shield(self._starting)  # others may wait for it, too
        return self

    async def _start(self) -> None:
        """The tokenizer loads here while the weights load there."""
        config, host = self.config, self._host
        resolved, checkpoint, _ = self._resolution or resolve(config, host)

        def engine(replica: int) -> Supervised:
            plan = resolved.for_replica(replica)
            make = partial(ProcessClient, config, plan, checkpoint, self._progress, factory=self._factory)
            return Supervised(make, self._restarts, first=make(process=self._process) if not replica else None)

        client: Supervised | Replicas = engine(0)
        if config.parallel.dp > 1:
            client = Replicas([client, *map(engine, range(1, config.parallel.dp))])
        starting = asyncio.ensure_future(client.start())
        await asyncio.sleep(0)  # the process is spawned before this one gets busy
        try:
            text = await asyncio.to_thread(TextSide.open, checkpoint, resolved, config)
            await starting
        except BaseException:
            starting.cancel()
            await client.close()
            raise
        client.observers = Observers(host, resolved, client.facts)
        client.observers.started()
        self._parts = resolved, checkpoint, client, text

    @property
    def _started(self) -> tuple[ResolvedPlan, Checkpoint, Supervised | Replicas, TextSide]:
        if self._parts is None:
            raise ConfigError("this AsyncLLM has not started", fix="use `async with`, or `await llm.ready()`")
        return self._parts

    @property
    def resolved(self) -> ResolvedPlan:
        return self._started[0]

    @property
    def checkpoint(self) -> Checkpoint:
        return self._started[1]

    @property
    def client(self) -> Supervised | Replicas:
        return self._started[2]

    @property
    def text(self) -> TextSide:
        return self._started[3]

    @property
    def facts(self) -> EngineFacts:
        return self.client.facts

    @property
    def life(self) -> EngineLife:
        """pause, sleep, update_weights, ... of an engine that has started."""
        if self._life is None:
            self._life = EngineLife(self.client)
        return self._life

    async def generate(
        self,
        prompts: Prompts,
        params: Params = None,
        *,
        n: int = 1,
        adapter: Adapters = None,
    ) -> list[RequestOutput]:
        """As `LLM.generate`."""
        return outputs_of(await self._run(text_asks(prompts, params, n, adapter)))

    async def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: Params = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        n: int = 1,
        tool_choice: str | ToolChoice = "auto",
        adapter: Adapters = None,
        template_options: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> list[RequestOutput]:
        """As `LLM.chat`."""
        asks = chat_asks(
            messages, params, tools=tools, n=n, tool_choice=tool_choice, adapter=adapter,
            template_options=template_options, continue_final_message=continue_final_message,
        )  # fmt: skip
        return outputs_of(await self._run(asks))

    async def beam_search(
        self, prompts: Prompts, params: BeamSearchParams, *, adapter: Adapters = None
    ) -> list[BeamSearchOutput]:
        """As `LLM.beam_search`."""
        groups = await self._run(beam_asks(prompts, params, adapter))
        return [beam_output(group, params, self.text.tokenizer) for group in groups]

    async def stream_text(
        self, prompt: PromptInput | Messages, params: SamplingParams | None = None
    ) -> AsyncIterator[str]:
        """As `LLM.stream_text`."""
        async with aclosing(self._stream([one_ask(prompt, params)])) as events:
            async for event in events:
                if isinstance(event, Text):
                    yield event.text
                elif isinstance(event, Finish) and event.error is not None:
                    raise GenerationFailed(event.error)

    def stream(self, prompt: PromptInput, params: SamplingParams | None = None) -> AsyncIterator[OutputEvent]:
        """As `LLM.stream`."""
        return self._stream(one_text_ask(prompt, params))

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template_options: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[OutputEvent]:
        """As `LLM.stream_chat`."""
        return self._stream(chat_asks([messages], params, tools=tools, template_options=template_options))

    def default_params(self, **changes: Any) -> SamplingParams:
        """The checkpoint's own sampling defaults (generation_config), changed as asked."""
        return SamplingParams(**{**(self.text.default_params or {}), **changes})

    def _prepare(self, asks: Sequence[Ask]) -> list[list[Turn]]:
        return prepare_all(self.text, self.facts, asks, f"llm-{uuid4().hex}")

    async def _run(self, asks: Sequence[Ask]) -> list[list[Turn]]:
        """Texts are rendered and tokenized in a thread. An error of the first event is one of the request."""
        await self.ready()
        groups = await asyncio.to_thread(self._prepare, asks)
        turns = [turn for group in groups for turn in group]
        async with Generation(self.client, turns, at_once=at_once(self.client)) as generation:
            if turns:
                async for turn, events in generation.events():
                    turn.message.feed(events)
                    check_taken(turn)
        return groups

    async def _stream(self, asks: Sequence[Ask]) -> AsyncGenerator[OutputEvent, None]:
        await self.ready()
        ((turn,),) = await asyncio.to_thread(self._prepare, asks)
        async with Generation(self.client, [turn]) as generation:
            async for _, events in generation.events():
                turn.message.feed(events)
                check_taken(turn)
                for event in events:
                    yield event

    async def _read(self, asks: Sequence[Ask], read: Callable[[list[list[Turn]]], Any]) -> Any:
        return read(await self._run(asks))

    async def stats(self) -> SchedStats:
        """What the scheduler counts, and what it holds now."""
        await self.ready()
        return (await self.client.stats()).sched

    async def start_profile(self, path: str, num_steps: int = 100) -> None:
        """As `LLM.start_profile`."""
        await self.ready()
        await self.client.change(SetProfile(path, num_steps))

    async def stop_profile(self) -> None:
        """As `LLM.stop_profile`."""
        await self.client.change(SetProfile("", 0))

    async def close(self) -> None:
        """Idempotent, also before it has started."""
        if self._parts is None:
            if self._starting is not None:
                self._starting.cancel()
                await asyncio.gather(self._starting, return_exceptions=True)
            return
        if self.client.observers is not None and self.client.state != "dead":
            self.client.observers.stopping()
        await self.client.close()

    async def __aenter__(self) -> AsyncLLM:
        try:
            return await self.ready()
        except BaseException:
            await self.close()
            raise

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _config(
    who: str, model: str | PathLike[str] | None, config: EngineConfig | None, options: dict[str, object]
) -> EngineConfig:
    """Raises ConfigError."""
    if config is not None and (options or model is not None):
        raise ConfigError(f"{who}: give either config= or a model and options", fix="put everything into config")
    check_options(who, options)
    if model is not None:
        options["model"] = fspath(model)
    return config or from_options(options)


@contextmanager
def _bar(num_outputs: int, wanted: bool | None) -> Iterator[Any]:
    """Calls of the yielded function (tokens, output finished) move a progress bar on stderr, or nothing."""
    import sys

    if not (sys.stderr.isatty() and num_outputs > 1 if wanted is None else wanted):
        yield lambda num_tokens, finished: None
        return
    try:
        from lmkit_python.progress import prompt_bar
    except ModuleNotFoundError:  # rich, of the extra lmkit-python[progress]
        yield lambda num_tokens, finished: None
        return
    with prompt_bar(num_outputs) as advance:
        yield advance
