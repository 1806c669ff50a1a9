"""LLM: generation in this process. AsyncLLM: an engine in its own process, for servers.

with LLM("demo") as llm:
    for output in llm.generate(["What is 2 + 3?", "Say hello"], SamplingParams(max_tokens=32)):
        print(output.text)
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING, Any

from lmkit.api import (
    ConfigError,
    EngineRequest,
    ErrorInfo,
    FinishReason,
    InvalidParam,
    Progress,
    Reasoning,
    RequestError,
    SamplingParams,
    Text,
    TokenEvent,
    ToolArgs,
    ToolChoice,
    ToolStart,
)
from lmkit.config import EngineConfig, from_options
from lmkit.config.environment import adopt_environment
from lmkit.engine.client import EventStream, ProcessClient
from lmkit.engine.observers import Observers, Watch
from lmkit.engine.platform import platform_environment
from lmkit.engine.shared import SharedCore
from lmkit.engine.spawn import FACTORY, EngineProcess
from lmkit.engine.supervisor import RESTARTS, Supervised
from lmkit.outputs import Completion, RequestOutput, ToolCall
from lmkit.plugins.host import PluginHost
from lmkit.plugins.resolve import resolve
from lmkit.pooled import PROMPT, PoolingCalls, answer_of, as_prompts, is_list, pool
from lmkit.text.control import shown
from lmkit.text.pooling import Call, Prompt, Vector
from lmkit.text.side import TextSide
from lmkit.text.stream import Finish, OutputEvent, OutputStream
from lmkit.text.tools import tool_def

if TYPE_CHECKING:
    from lmkit.api import Checkpoint, ModelInfo, ResolvedPlan
    from lmkit.engine.messages import EngineFacts

Messages = Sequence[Mapping[str, Any]]


@dataclass(slots=True)
class _Job:
    """A request on its way: what collects its events."""

    request: EngineRequest
    output: RequestOutput
    completion: Completion
    stream: OutputStream
    number: int  # of the prompt
    watch: Watch | None = None  # of plugins that observe requests
    calls: dict[int, ToolCall] = field(default_factory=dict)

    def take(self, event: TokenEvent) -> bool:
        """Adds an event. True when the output is complete."""
        if self.watch is not None:
            self.watch.see(event)
        if event.num_cached is not None:
            self.output.num_cached = max(self.output.num_cached, event.num_cached)
        if self.completion.logprobs is not None:
            self.completion.logprobs += event.logprobs
        for news in self.stream.feed(event):
            match news:
                case Text(text):
                    self.completion.text += text
                case Reasoning(text):
                    self.completion.reasoning += text
                case ToolStart(index, id, name):
                    self.calls[index] = ToolCall(id, name)
                    self.completion.tool_calls.append(self.calls[index])
                case ToolArgs(index, fragment):
                    self.calls[index].arguments += fragment
                case Finish(reason, stop, _, error):
                    self._finish(reason, stop, error)
        return self.stream.finished

    @property
    def must_abort(self) -> bool:
        return self.stream.must_abort

    @property
    def num_tokens(self) -> int:
        return len(self.completion.token_ids)

    def _finish(self, reason: FinishReason, stop: str | int | None, error: ErrorInfo | None) -> None:
        done = self.completion
        done.finish_reason, done.stop, done.error = reason, stop, error
        done.token_ids = self.stream.token_ids
        if done.logprobs is not None:
            del done.logprobs[len(done.token_ids) :]
        if self.output.prompt_logprobs is not None and not self.output.prompt_logprobs:
            self.output.prompt_logprobs = self.stream.prompt_logprobs


@dataclass(slots=True)
class _Pooling:
    """A pooling request on its way."""

    request: EngineRequest
    number: int
    watch: Watch | None = None
    vector: Vector | None = None
    must_abort: bool = False
    num_tokens: int = 0

    def take(self, event: TokenEvent) -> bool:
        """Raises the error that ended it."""
        if self.watch is not None:
            self.watch.see(event)
        self.vector = answer_of(event)
        return True


class LLM(PoolingCalls):
    """A model in this process. Thread-safe: what several threads ask for runs in the same steps.

    Options are the fields of EngineConfig by name, as on the command line: LLM("demo", dtype="float32",
    kv_memory="1GiB", attention="torch"). Raises what prevents starting: ConfigError, SelectionError, CheckpointError,
    CapacityError, PluginError.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: EngineConfig | None = None,
        host: PluginHost | None = None,
        progress: Progress | None = None,
        own_process: bool = False,
        **options: object,
    ) -> None:
        """`own_process`: this process exists for the model, so the platform may set up its environment (threads)."""
        if config is not None and (options or model is not None):
            raise ConfigError("LLM: give either config= or a model and options", fix="put everything into config")
        if model is not None:
            options["model"] = model
        self.config = config or from_options(options)
        host = host or PluginHost()
        self.resolved, self.checkpoint, self.info = resolve(self.config, host)
        if own_process:
            adopt_environment(platform_environment(self.config, self.resolved))
        with ThreadPoolExecutor(1) as beside:
            opening = beside.submit(TextSide.open, self.checkpoint, self.resolved, self.config, host)
            from lmkit.engine.build import build_engine  # imports torch, which takes as long
        self.text = opening.result()
        self._engine = build_engine(self.config, self.resolved, self.checkpoint, progress, self.text.tokenizer)
        self._observers = Observers(host, self.resolved, self.facts)
        self._observers.started()
        limits = self.config.sched
        self._shared = SharedCore(self._engine.core, limits.max_rows + min(limits.max_rows, limits.queue))
        self._numbers = count(1)

    @property
    def facts(self) -> EngineFacts:
        return self._engine.facts

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        adapter: str | Sequence[str | None] | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """One RequestOutput per prompt, in order; `n` outputs for each.

        `params`: one for all, or one per prompt. `progress`: a bar on stderr; default: when it is a terminal and
        there are several prompts. Raises RequestError when a prompt cannot be taken; then no output is
        returned. `adapter`: the name of a loaded one, or
        one name or None per prompt.
        """
        each = as_prompts(prompts)
        jobs: list[list[_Job]] = []
        for number, (prompt, one) in enumerate(zip(each, _per_prompt(params, len(each)), strict=True)):
            ids = self.text.encode_prompt(prompt) if isinstance(prompt, str) else list(prompt)
            text = prompt if isinstance(prompt, str) else None
            jobs.append(self._completion_jobs(number, text, ids, one, n))
        return self._run(jobs, progress, adapter)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        n: int = 1,
        tool_choice: str | ToolChoice = "auto",
        adapter: str | Sequence[str | None] | None = None,
        template_options: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """One conversation ([{"role": ..., "content": ...}, ...]) or several. Reasoning and tool calls are parsed.

        `tools` as in the OpenAI API: [{"type": "function", "function": {...}}]; `tool_choice`: "auto", "none",
        "required", or ToolChoice("named", NAME). `params.grammar` constrains the answer after its reasoning. Raises
        RequestError.
        """
        choice = _tool_choice(tool_choice)
        several = _conversations(messages)
        jobs = [
            self._chat_jobs(number, conversation, one, n, tools, choice, template_options, continue_final_message)
            for number, (conversation, one) in enumerate(zip(several, _per_prompt(params, len(several)), strict=True))
        ]
        return self._run(jobs, progress, adapter)

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template_options: Mapping[str, Any] | None = None,
    ) -> Iterator[OutputEvent]:
        """The answer as it is made: Text, Reasoning, Tool* events and a Finish. Leaving the iterator early aborts."""
        (conversation,) = _conversations([messages])
        (params,) = _per_prompt(params, 1)
        (job,) = self._chat_jobs(0, conversation, params, 1, tools, ToolChoice(), template_options, False)
        yield from self._stream(job)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[OutputEvent]:
        """The completion as it is made: Text events and a Finish. Leaving the iterator early aborts."""
        if len(prompts := as_prompts(prompt)) != 1:
            raise InvalidParam("prompt", prompt, PROMPT)
        prompt = prompts[0]
        (params,) = _per_prompt(params, 1)
        ids = self.text.encode_prompt(prompt) if isinstance(prompt, str) else list(prompt)
        text = prompt if isinstance(prompt, str) else None
        (job,) = self._completion_jobs(0, text, ids, params, 1)
        yield from self._stream(job)

    def _stream(self, job: _Job) -> Iterator[OutputEvent]:
        with self._shared.open() as call:
            call.add(job.request)
            while not job.stream.finished:
                for _, event in call.wait():
                    if isinstance(event, Exception):
                        raise event
                    if job.watch is not None:
                        job.watch.see(event)
                    yield from job.stream.feed(event)

    def _completion_jobs(
        self, number: int, text: str | None, ids: list[int], params: SamplingParams, n: int
    ) -> list[_Job]:
        """The n requests of one prompt that is to be continued."""
        return self._expand(
            number, text, ids, params, n, lambda: self.text.output_stream(params, parse=False, prompt_ids=ids)
        )

    def _chat_jobs(
        self,
        number: int,
        messages: Messages,
        params: SamplingParams,
        n: int,
        tools: Sequence[Mapping[str, Any]],
        choice: ToolChoice,
        template_options: Mapping[str, Any] | None,
        continue_final_message: bool,
    ) -> list[_Job]:
        """The n requests of one conversation."""
        tools = [] if choice.mode == "none" else tools
        text = self.text.render_chat(
            messages,
            tools,
            template_options,
            add_generation_prompt=not continue_final_message,
            continue_final_message=continue_final_message,
        )
        ids = self.text.encode_prompt(text, add_special=False)
        definitions = [tool_def(tool) for tool in tools]
        if choice.mode == "named" and choice.name not in [d.name for d in definitions]:
            raise InvalidParam("tool_choice", choice.name, "the name of one of the tools")
        tail = self.text.prompt_tail(text, _text(messages[-1].get("content")) if continue_final_message else "")
        params, constrained = self.text.constrain(params, tail, template_options, definitions, choice)
        return self._expand(
            number,
            shown(text),
            ids,
            params,
            n,
            lambda: self.text.output_stream(
                params, tail, definitions, prompt_ids=ids, continued=continue_final_message, constrained=constrained
            ),
        )  # fmt: skip

    def default_params(self, **changes: Any) -> SamplingParams:
        """The checkpoint's own sampling defaults (generation_config), changed as asked."""
        return SamplingParams(**{**(self.text.default_params or {}), **changes})

    def _expand(self, number: int, text: str | None, ids: list[int], params: SamplingParams, n: int,
                stream: Any) -> list[_Job]:  # fmt: skip
        """The n requests of one prompt: independent, with seeds seed, seed + 1, ..."""
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise InvalidParam("n", n, "an integer, at least 1")
        output = RequestOutput(text, ids, [], [] if params.prompt_logprobs is not None else None)
        jobs = []
        for i in range(n):
            own = params if i == 0 else replace(
                params, seed=None if params.seed is None else params.seed + i, prompt_logprobs=None
            )  # fmt: skip
            completion = Completion(i, logprobs=[] if params.logprobs is not None else None)
            output.outputs.append(completion)
            request = EngineRequest(f"llm-{next(self._numbers)}", ids, own, arrival=monotonic())
            jobs.append(_Job(request, output, completion, stream(), number, watch=self._observers.watch(request)))
        return jobs

    def load_adapter(self, name: str, path: str) -> None:
        """A PEFT adapter under a name that `adapter=` takes. Needs enable_lora. Raises what prevents it."""
        with self._shared.alone():
            self._engine.core.adapters.load(name, str(path))

    def unload_adapter(self, name: str) -> None:
        with self._shared.alone():
            self._engine.core.adapters.unload(name)

    def _run(
        self, groups: list[list[_Job]], progress: bool | None, adapter: str | Sequence[str | None] | None = None
    ) -> list[RequestOutput]:
        jobs = [job for group in groups for job in group]
        names = [adapter] * len(groups) if adapter is None or isinstance(adapter, str) else list(adapter)
        if len(names) != len(groups):
            raise InvalidParam("adapter", len(names), f"one for all, or one per prompt ({len(groups)})")
        for job in jobs:
            job.request.adapter = names[job.number]
        with _bar(len(groups), progress) as advance:
            self._step_until_done(jobs, advance)
        return [group[0].output for group in groups]

    def _step_until_done(self, jobs: Sequence[_Job | _Pooling], advance: Any) -> None:
        """Nothing is left behind, ever."""
        running = {job.request.id: job for job in jobs}
        left = Counter(job.number for job in jobs)
        with self._shared.open() as call:
            for job in jobs:
                call.add(job.request)
            while running:
                for id, event in call.wait():
                    job = running[id]
                    if isinstance(event, RequestError):
                        event.message = f"prompt {job.number}: {event.message}"
                        event.args = (event.message,)
                    if isinstance(event, Exception):
                        raise event
                    if not job.take(event):
                        continue
                    del running[id]
                    if job.must_abort:
                        call.abort(id)
                    left[job.number] -= 1
                    advance(job.num_tokens, left[job.number] == 0)

    def _pooled(self, call: Call[Any]) -> Any:
        jobs = []
        for number, one in enumerate(call.requests):
            name = f"llm-{next(self._numbers)}"
            request = EngineRequest(name, one.token_ids, SamplingParams(), arrival=monotonic(), pooling=one.params)
            jobs.append(_Pooling(request, number, self._observers.watch(request)))
        with _bar(len(jobs), None) as advance:
            self._step_until_done(jobs, advance)
        return call.finish([job.vector for job in jobs if job.vector is not None])

    def close(self) -> None:
        """Frees everything; what other threads are waiting for ends with EngineDead. Idempotent."""
        if self._shared.close():
            self._observers.stopping()
            self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncLLM(PoolingCalls):
    """An engine in its own process, with the text side beside it. Made by `AsyncLLM.start`."""

    def __init__(
        self,
        config: EngineConfig,
        resolved: ResolvedPlan,
        checkpoint: Checkpoint,
        client: Supervised,
        text: TextSide,
    ) -> None:
        self.config = config
        self.resolved = resolved
        self.checkpoint = checkpoint
        self.client = client
        self.text = text

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        progress: Progress | None = None,
        resolution: tuple[ResolvedPlan, Checkpoint, ModelInfo] | None = None,
        host: PluginHost | None = None,
        factory: str = FACTORY,
        restarts: int = RESTARTS,
        process: EngineProcess | None = None,
    ) -> AsyncLLM:
        """Returns when the engine is ready. The tokenizer loads here while the weights load there.

        An engine that dies is replaced, see engine.supervisor.Supervised; `restarts` = 0: it is not.

        `resolution`: what `lmkit.plugins.resolve` said, when the caller has asked it already, with `host`; `process`:
        the first engine's, when the caller has started it already and told it to build just that.
        """
        host = host or PluginHost()
        resolved, checkpoint, _ = resolution or resolve(config, host)
        make = partial(ProcessClient, config, resolved, checkpoint, progress, factory=factory)
        client = Supervised(make, restarts, first=make(process=process))
        starting = asyncio.ensure_future(client.start())
        await asyncio.sleep(0)  # the process is spawned before this one gets busy
        try:
            text = await asyncio.to_thread(TextSide.open, checkpoint, resolved, config, host)
            await starting
        except BaseException:
            starting.cancel()
            await client.close()
            raise
        client.observers = Observers(host, resolved, client.facts)
        client.observers.started()
        return cls(config, resolved, checkpoint, client, text)

    @property
    def facts(self) -> EngineFacts:
        return self.client.facts

    async def _pooled(self, call: Call[Any]) -> Any:
        return call.finish(await pool(self.client, call))

    def submit(self, request: EngineRequest) -> EventStream:
        """The events of the request; exactly one of them finishes it."""
        return self.client.submit(request)

    def abort(self, ids: Iterable[str]) -> None:
        self.client.abort(ids)

    async def close(self) -> None:
        if self.client.observers is not None and self.client.state != "dead":
            self.client.observers.stopping()
        await self.client.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part.get("text") or "" for part in content or ())


def _conversations(messages: Messages | Sequence[Messages]) -> list[Messages]:
    """A single conversation is a list of one. Raises InvalidParam naming the message."""
    need = "a list of messages like {'role': 'user', 'content': 'Hello'}"
    if not is_list(messages) or not messages:
        raise InvalidParam("messages", messages, need)
    several: list[Any] = [messages] if isinstance(messages[0], Mapping) else list(messages)
    for conversation in several:
        if not is_list(conversation) or not conversation:
            raise InvalidParam("messages", conversation, need)
        for i, message in enumerate(conversation):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise InvalidParam(f"messages[{i}]", message, "a mapping with role and content")
            content = message.get("content")
            if not (isinstance(content, str) or is_list(content) or (content is None and "tool_calls" in message)):
                raise InvalidParam(f"messages[{i}].content", content, "a text")
    return several


def _tool_choice(choice: str | ToolChoice) -> ToolChoice:
    if isinstance(choice, ToolChoice):
        return choice
    if choice not in ("auto", "none", "required"):
        raise InvalidParam("tool_choice", choice, "'auto', 'none', 'required' or a ToolChoice")
    return ToolChoice(choice)  # type: ignore[arg-type]


def _per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, num: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num
    if not is_list(params) or not all(isinstance(one, SamplingParams) for one in params):
        raise InvalidParam("params", params, "SamplingParams, or a list of them")
    if len(params) != num:
        raise InvalidParam("params", len(params), f"one for all, or one per prompt ({num})")
    return list(params)


@contextmanager
def _bar(num_prompts: int, wanted: bool | None) -> Iterator[Any]:
    """Calls of the yielded function (tokens, prompt finished) move a progress bar on stderr, or nothing."""
    import sys

    if not (sys.stderr.isatty() and num_prompts > 1 if wanted is None else wanted):
        yield lambda num_tokens, finished: None
        return
    try:
        from lmkit.progress import prompt_bar
    except ModuleNotFoundError:  # rich, of the extra lmkit-core[progress]
        yield lambda num_tokens, finished: None
        return
    with prompt_bar(num_prompts) as advance:
        yield advance
