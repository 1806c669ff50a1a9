"""prepare: an ask becomes turns, and each turn one request of the engine. CPU work only; it may run in a thread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import TYPE_CHECKING, Any

from lmkit.api import (
    EngineRequest,
    InvalidParam,
    PoolingParams,
    RequestError,
    SamplingParams,
    TemplateFailed,
    Tokenizer,
    UnsupportedTask,
    blaming,
)
from lmkit.prompts import shown

from lmkit_python.front.ask import (
    Ask,
    ChatAsk,
    GenerateAsk,
    PoolAsk,
    Prompt,
    ScoreAsk,
    TextAsk,
    UnsupportedField,
    VectorAsk,
)
from lmkit_python.front.limits import TEMPLATE_SLACK, ContextTooLong, check_ids, check_prompt, check_texts, strings
from lmkit_python.front.message import Message

if TYPE_CHECKING:
    from lmkit.engine.messages import EngineFacts
    from lmkit.text.side import TextSide
    from lmkit.text.stream import OutputStream

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
SEEDS = 1 << 64


@dataclass(slots=True)
class Turn:
    """One answer under way: what the engine is asked, what reads its tokens, and what they amount to."""

    index: int  # of the answer among those of its ask
    prompt: str | None  # as a person reads it; None: token ids that nobody reads, or two texts
    request: EngineRequest
    stream: OutputStream
    constrained_by: str  # the client's name of what the grammar came from
    message: Message = field(default_factory=Message)
    submitted: float = 0.0  # monotonic seconds
    first: float = 0.0  # when the first token came; 0: none did
    last: float = 0.0  # when the latest token came
    number: int | None = None  # of its ask, among those of one call; None: there is but one


def prepare(text: TextSide, facts: EngineFacts, ask: Ask, id: str) -> list[Turn]:
    """The turns of an ask, whose requests are called `id`-0, `id`-1, ... Raises RequestError, or PluginError."""
    try:
        with blaming(text.choices):
            return _prepare(text, facts, ask, id)
    except RequestError as error:
        if error.field == "prompt":
            error.field = ask.prompt_field
            if error.message.startswith("prompt: "):
                error.message = f"{ask.prompt_field}: {error.message.removeprefix('prompt: ')}"
                error.args = (error.message,)
        raise


def _prepare(text: TextSide, facts: EngineFacts, ask: Ask, id: str) -> list[Turn]:
    if isinstance(ask, PoolAsk):
        return _pool(text, facts, ask, id)
    if isinstance(ask, ScoreAsk):
        return _score(text, facts, ask, id)
    if facts.pooler is not None:
        raise UnsupportedTask("generate", facts.pooler.tasks)
    if isinstance(ask, ChatAsk):
        return _chat(text, facts, ask, id)
    assert isinstance(ask, TextAsk)
    return _text(text, facts, ask, id)


def prepare_all(text: TextSide, facts: EngineFacts, asks: Sequence[Ask], id: str) -> list[list[Turn]]:
    """The turns of each ask of one call. Raises RequestError, which says of which of several prompts it is."""
    groups = []
    for i, ask in enumerate(asks):
        number = i if len(asks) > 1 else None
        try:
            turns = prepare(text, facts, ask, f"{id}-{i}")
        except RequestError as error:
            raise numbered(error, number) from None
        for turn in turns:
            turn.number = number
        groups.append(turns)
    return groups


def numbered(error: Exception, number: int | None) -> Exception:
    """The error, which now says of which prompt it is; None: there is but one."""
    if number is not None and isinstance(error, RequestError):
        error.message = f"prompt {number}: {error.message}"
        error.args = (error.message,)
    return error


def expand(params: SamplingParams, n: int, scores_each: bool = False) -> list[SamplingParams]:
    """The params of n answers to a prompt: the same, with other seeds; the prompt is scored once, or each time."""
    several = [params]
    for i in range(1, n):
        seed = params.seed
        if seed is not None:  # beyond the largest the smallest follows
            seed = (seed + i + SEEDS // 2) % SEEDS - SEEDS // 2
        scored = params.prompt_logprobs if scores_each else None
        several.append(replace(params, seed=seed, prompt_logprobs=scored))
    return several


def rendered(text: TextSide, ask: ChatAsk) -> str:
    """The prompt that the chat template makes of a conversation, for `TextSide.encode_prompt`. Raises RequestError."""
    options = _template_options(text, ask)
    try:
        return text.render_chat(
            ask.messages, ask.tools, options, ask.add_generation_prompt, ask.continue_final, ask.documents
        )
    except TemplateFailed as error:
        raise error.renamed(ask.places) from error


def _chat(text: TextSide, facts: EngineFacts, ask: ChatAsk, id: str) -> list[Turn]:
    if ask.tools:
        _check_tools(text)
    options = _template_options(text, ask)
    given = strings([ask.messages, ask.tools, options, ask.documents])
    check_texts(text.tokenizer, given, facts, TEMPLATE_SLACK)
    prompt = rendered(text, ask)
    check_texts(text.tokenizer, [prompt], facts, TEMPLATE_SLACK if ask.last else 1)
    token_ids = text.encode_prompt(prompt, add_special=False)[-_last(ask, facts) :]
    room = check_prompt(token_ids, facts, ask.params.max_tokens, ask.default_tokens)
    params = replace(_with_words(text.tokenizer, ask.params), max_tokens=room)
    tail = text.prompt_tail(prompt, ask.final_text)
    budget = ask.thinking_budget
    if budget is not None and text.reasoning_format is None:
        if ask.dropped is None:
            raise UnsupportedField("thinking_token_budget", "no reasoning parser is chosen for this model")
        ask.dropped.add("thinking_token_budget")  # what does not think keeps to every budget
        budget = None
    constrained_by = ask.grammar_field if params.grammar is not None else "tools"
    params, constrained = text.constrain(
        params, tail, options, ask.tool_defs, ask.tool_choice,
        parallel=ask.parallel_calls, thinking_budget=budget,
    )  # fmt: skip

    def stream(params: SamplingParams) -> OutputStream:
        return text.output_stream(
            params, tail, ask.tool_defs, prompt_ids=token_ids, continued=ask.continue_final,
            include_stop=ask.include_stop, skip_special=ask.skip_special, single_call=not ask.parallel_calls,
            constrained=constrained, whole_calls=ask.whole_calls,
        )  # fmt: skip

    read = shown(prompt)
    return [
        Turn(i, read, request, stream(request.params), constrained_by)
        for i, request in enumerate(_requests(ask, id, 0, token_ids, params))
    ]


def _text(text: TextSide, facts: EngineFacts, ask: TextAsk, id: str) -> list[Turn]:
    turns: list[Turn] = []
    params = _with_words(text.tokenizer, ask.params)
    for prompt in ask.prompts:
        if isinstance(prompt, str):
            check_texts(text.tokenizer, [prompt], facts, TEMPLATE_SLACK if ask.last else 1)
            token_ids = text.encode_prompt(prompt, add_special=ask.add_special)
        else:
            token_ids = list(prompt)
        token_ids = token_ids[-_last(ask, facts) :]
        room = check_prompt(token_ids, facts, ask.params.max_tokens, ask.default_tokens)
        read = prompt if isinstance(prompt, str) else text.decode_all(token_ids) if ask.shows_prompts else None
        for request in _requests(ask, id, len(turns), token_ids, replace(params, max_tokens=room)):
            stream = text.output_stream(
                request.params, parse=False, prompt_ids=token_ids, include_stop=ask.include_stop,
                skip_special=ask.skip_special,
            )  # fmt: skip
            turns.append(Turn(len(turns), read, request, stream, ask.grammar_field))
    if ask.resume is None and ask.beams is None and len(turns) > 1:  # which of them went on cannot be told
        for turn in turns:
            turn.request.resume = False
    return turns


def _last(ask: GenerateAsk, facts: EngineFacts) -> int:
    """How many tokens at the end of a prompt are read; 0: all."""
    if ask.last != -1:
        return ask.last or 0
    wanted = ask.params.max_tokens
    return facts.max_length - (wanted if wanted and wanted < facts.max_length else 1)


def _with_words(tokenizer: Tokenizer, params: SamplingParams) -> SamplingParams:
    """The params with their words and allowed tokens in the form that logits processors read. Raises InvalidParam."""
    # as it is written where a text begins, and after a blank
    forms = [tuple(tokenizer.encode(f"{blank}{word.lstrip()}", add_special=False))
             for word in params.bad_words for blank in ("", " ")]  # fmt: skip
    ids: dict[str, list[Any]] = {"bad_words": [list(form) for form in dict.fromkeys(forms) if form],
           "allowed_token_ids": list(params.allowed_token_ids)}  # fmt: skip
    extra = dict(params.extra)
    for name in [name for name, value in ids.items() if value]:
        if name in extra:
            raise InvalidParam(name, getattr(params, name), f"left out where extra has {name}")
        extra[name] = {"ids": ids[name]}
    return replace(params, extra=extra, bad_words=(), allowed_token_ids=()) if extra != params.extra else params


def _requests(
    ask: GenerateAsk, id: str, first: int, token_ids: list[int], params: SamplingParams
) -> list[EngineRequest]:
    """One for each answer to a prompt, numbered from `first` on; the answers of a search have one together.

    One of those whose tokens do not depend on chance is resumed without being told to.
    """
    beams = replace(ask.beams, n=ask.n) if ask.beams is not None else None
    certain = beams is not None or (ask.n == 1 and (params.greedy or params.seed is not None))
    resume = certain if ask.resume is None else ask.resume
    scores_each = isinstance(ask, TextAsk) and ask.scores_each
    requests = [
        EngineRequest(
            f"{id}-{number}", token_ids, one, ask.priority, monotonic(), ask.adapter, ask.salt, beams=beams,
            resume=resume,
        )
        for number, one in enumerate(expand(params, 1 if beams else ask.n, scores_each), start=first)
    ]  # fmt: skip
    return requests * ask.n if beams else requests


def _pool(text: TextSide, facts: EngineFacts, ask: PoolAsk, id: str) -> list[Turn]:
    pooler = facts.pooler
    params = ask.params or PoolingParams(pooler.task if pooler is not None else "embed")
    if pooler is None or params.task not in pooler.tasks:
        raise UnsupportedTask(params.task, _tasks(facts))
    if ask.chat is None:
        return _vectors(text, facts, ask, id, ask.prompts, params, ask.add_special)
    check_texts(text.tokenizer, strings(ask.chat.messages), facts, TEMPLATE_SLACK)
    prompt = rendered(text, ask.chat)
    token_ids = text.encode_prompt(prompt, add_special=ask.add_special, limit=ask.limit)
    return [_vector_turn(text, facts, ask, f"{id}-0", 0, shown(prompt), token_ids, params)]


def _score(text: TextSide, facts: EngineFacts, ask: ScoreAsk, id: str) -> list[Turn]:
    """A cross-encoder (a classifier with one class) reads both texts at once; else each text has a vector."""
    pooler, texts = facts.pooler, list(dict.fromkeys([*ask.queries, *ask.documents]))
    if pooler is not None and pooler.task in ("embed", "token_embed"):
        return _vectors(text, facts, ask, id, texts, PoolingParams(pooler.task))
    if pooler is None or pooler.task != "classify" or pooler.size != 1:
        raise UnsupportedTask("score", _tasks(facts))
    _check_uncut(text, facts, ask, texts)
    turns: list[Turn] = []
    for query, document in ask.pairs:
        token_ids, second = text.encode_pair(query, document, limit=ask.limit)
        params = PoolingParams("classify", activation=ask.activation, second=second)
        turns.append(_vector_turn(text, facts, ask, f"{id}-{len(turns)}", len(turns), None, token_ids, params))
    return turns


def _vectors(
    text: TextSide, facts: EngineFacts, ask: VectorAsk, id: str, prompts: Sequence[Prompt], params: PoolingParams,
    add_special: bool = True,
) -> list[Turn]:  # fmt: skip
    """A turn for each prompt: of texts with what the checkpoint puts before them."""
    before = facts.pooler.prompt if facts.pooler is not None else ""
    prompts = [before + prompt if isinstance(prompt, str) else prompt for prompt in prompts]
    _check_uncut(text, facts, ask, prompts)
    turns: list[Turn] = []
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            token_ids = text.encode_prompt(prompt, add_special=add_special, limit=ask.limit)
        else:
            token_ids = list(prompt)[: ask.limit]
        read = prompt if isinstance(prompt, str) else None
        turns.append(_vector_turn(text, facts, ask, f"{id}-{i}", i, read, token_ids, params))
    return turns


def _vector_turn(
    text: TextSide, facts: EngineFacts, ask: VectorAsk, id: str, index: int, read: str | None, token_ids: list[int],
    params: PoolingParams,
) -> Turn:  # fmt: skip
    check_ids(token_ids, facts)
    if len(token_ids) > facts.max_length:
        raise ContextTooLong(len(token_ids), facts.max_length)
    request = EngineRequest(
        id, token_ids, SamplingParams(), ask.priority, monotonic(), ask.adapter, ask.salt, pooling=params
    )
    stream = text.output_stream(request.params, parse=False)  # no token comes: nothing joins to the prompt
    stream.usage.prompt_tokens = len(token_ids)
    return Turn(index, read, request, stream, "")


def _check_uncut(text: TextSide, facts: EngineFacts, ask: VectorAsk, prompts: Iterable[Prompt]) -> None:
    """All texts, before the first is tokenized; with a limit they are cut. Raises ContextTooLong."""
    for prompt in prompts if ask.limit is None else ():
        if isinstance(prompt, str):
            check_texts(text.tokenizer, [prompt], facts)


def _tasks(facts: EngineFacts) -> tuple[str, ...]:
    """What the model does instead."""
    return ("generate",) if facts.pooler is None else facts.pooler.tasks


def _check_tools(text: TextSide) -> None:
    """Tools that the model would never see, or calls that nobody would read, are refused."""
    if text.renderer is not None and not text.renderer.takes_tools:
        raise UnsupportedField("tools", "the chat template of this model does not take tools", fix="leave them out")
    if text.tool_format is None:
        raise UnsupportedField(
            "tools", "no tool parser is chosen for this model", fix="choose one with --tool-parser NAME"
        )


def _template_options(text: TextSide, ask: ChatAsk) -> Mapping[str, Any]:
    """The variables of the template: the ask's options, and its effort, which is one of them or turns thinking on or
    off. What the template does not read is dropped, where the ask allows that. Raises RequestError."""
    variables = text.renderer.options if text.renderer is not None else frozenset()
    options = dict(ask.template_options)
    if ask.dropped is not None and text.renderer is not None:
        ask.dropped.update(f"chat_template_kwargs.{name}" for name in options if name not in variables)
        options = {name: value for name, value in options.items() if name in variables}
    if ask.effort is None:
        return options
    if "reasoning_effort" in variables:
        return {"reasoning_effort": ask.effort, **options}
    named = getattr(text.reasoning_format, "switch", ())
    switch = next((s for s in (*named, "enable_thinking", "thinking") if s in variables), None)
    if switch is not None and ask.effort in EFFORTS:
        return {switch: ask.effort != "none", **options}
    if switch is not None:
        raise InvalidParam(ask.effort_field, ask.effort, f"one of {', '.join(EFFORTS)}")
    if ask.dropped is None:
        raise UnsupportedField(ask.effort_field, "the chat template of this model knows no reasoning effort")
    ask.dropped.add(ask.effort_field)
    return options
