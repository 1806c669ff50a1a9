"""TextSide: everything between a client's text and the engine's tokens, for one checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmkit.api import (
    Checkpoint,
    CheckpointError,
    CheckpointOptions,
    Choice,
    DeclaredFormat,
    ResolvedPlan,
    SamplingParams,
    TemplateFailed,
    Tokenizer,
    ToolChoice,
    ToolDef,
    Vocabulary,
    owner_of,
)
from lmkit.files import chat_templates
from lmkit.generation import end_ids, recommended
from lmkit.plugins import load_target
from lmkit.plugins.catalog import install_command
from lmkit.plugins.chat_templates import chosen_template
from lmkit.plugins.refs import ask
from lmkit.text.constrain import answer_of, constraint, thinking_of
from lmkit.text.formats import AnyFormat, Chain, in_order, made_format, start_parser
from lmkit.text.measure import beginning
from lmkit.text.renderer import WriterRenderer, open_renderer
from lmkit.text.stops import Stops
from lmkit.text.stream import OutputStream, Usage

if TYPE_CHECKING:
    from lmkit.api import ChatRenderer
    from lmkit.contracts.config import EngineConfig, ModelConfig

_TOKENIZER_FILES = ("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "chat_template.*")
_AT_ONCE = 1 << 16  # tokens
TAIL = 256  # characters of the prompt that parsers look at


@dataclass(frozen=True)
class TextSide:
    """Immutable and thread-safe; made once per process."""

    tokenizer: Tokenizer
    renderer: ChatRenderer | None = None
    tool_format: AnyFormat | None = None
    reasoning_format: AnyFormat | None = None
    default_params: Mapping[str, Any] | None = None
    choices: tuple[Choice, ...] = ()  # the plugins that errors may come from

    @classmethod
    def open(cls, checkpoint: Checkpoint, resolved: ResolvedPlan, config: EngineConfig) -> TextSide:
        """Raises CheckpointError (tokenizer missing or damaged), ConfigError (template does not compile).

        The plan says what reads the tokenizer and the template.
        """
        template = chosen_template(resolved.choices, config.model.chat_template, checkpoint)
        tokenizer = load_tokenizer(checkpoint, resolved, config)
        if not (template or tokenizer.chat_template or config.model.tokenizer):
            template = chat_templates(checkpoint.path).get("default")
        defaults, _ = recommended(checkpoint.generation_config)
        formats = format_of(resolved, "tool_parser"), format_of(resolved, "reasoning_parser")
        renderer = _renderer(resolved, tokenizer, template, formats)
        return cls(tokenizer, renderer, *formats, defaults, resolved.choices)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The prompt, for `encode_prompt`; lmkit.prompts.shown makes it presentable. Raises TemplateFailed."""
        if self.renderer is None:
            raise TemplateFailed(
                "this checkpoint has no chat template",
                fix="start the server with --chat-template FILE, or use /v1/completions",
            )
        return self.renderer.render(
            messages, tools, kwargs,
            add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message,
            documents=documents,
        )  # fmt: skip

    def encode_prompt(self, text: str, *, add_special: bool = True, limit: int | None = None) -> list[int]:
        """Token ids; a rendered chat prompt already has its special tokens (add_special=False).

        `limit`: a longer text is cut to so many tokens, the special ones among them.
        """
        if limit is not None:
            text = beginning(self.tokenizer, text, limit)
        ids = self.tokenizer.encode_marked(text, add_special=add_special)
        if limit is None or len(ids) <= limit:
            return ids
        return self.tokenizer.encode_pair(text, None, limit)[0] if add_special else ids[:limit]

    def encode_pair(self, first: str, second: str, *, limit: int | None = None) -> tuple[list[int], int]:
        """Token ids of two texts that a model reads together, and where the second begins (0: it is not marked)."""
        if limit is not None:
            first, second = (beginning(self.tokenizer, text, limit) for text in (first, second))
        return self.tokenizer.encode_pair(first, second, limit)

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """The text of any tokens, special ones shown. Many are decoded one by one: a call for all holds up others."""
        if len(token_ids) <= _AT_ONCE:
            return self.tokenizer.decode(token_ids, skip_special=False)
        detokenizer = self.tokenizer.detokenizer(skip_special=False)
        return "".join(map(detokenizer.feed, token_ids)) + detokenizer.flush()

    def prompt_tail(self, prompt: str, continued: str = "") -> str:
        """What `output_stream` needs to know of a rendered prompt. `continued`: the message it ends in, if it does."""
        fmt = self.reasoning_format
        if continued and isinstance(fmt, DeclaredFormat) and (opened := fmt.reopened(continued)):
            return opened  # the answer goes on inside the reasoning
        return prompt[-TAIL:]

    def constrain(
        self,
        params: SamplingParams,
        prompt_tail: str,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[ToolDef] = (),
        choice: ToolChoice | None = None,
        *,
        parallel: bool = True,
        thinking_budget: int | None = None,
    ) -> tuple[SamplingParams, bool]:
        """`params` of a chat with what the output must be: its grammar is about the answer, or about calls of tools.

        Also whether the answer is nothing but that (`constrained` of `output_stream`). A named tool is called exactly
        once, as in the OpenAI API; `parallel` is about the other choices. Raises RequestError.
        """
        answer = answer_of(self.reasoning_format, params.grammar)
        choice = choice or ToolChoice()
        grammar = constraint(answer, tools, choice, self.tool_format, parallel and choice.mode != "named")
        if grammar is None and thinking_budget is None:
            return params, False
        thinking = thinking_of(self.reasoning_format, prompt_tail, template_kwargs or {}, thinking_budget)
        is_all = grammar is not None and (answer is not None or choice.mode != "auto")
        return replace(params, grammar=grammar, thinking=thinking), is_all

    def output_stream(
        self,
        params: SamplingParams,
        prompt_tail: str = "",
        tools: Sequence[ToolDef] = (),
        parse: bool = True,
        *,
        prompt_ids: Sequence[int] = (),
        continued: bool = False,
        include_stop: bool = False,
        skip_special: bool = True,
        single_call: bool = False,
        constrained: bool = False,
        whole_calls: bool | Collection[str] = False,
    ) -> OutputStream:
        """The stream of one choice. `parse=False`: all output is text (completions, reasoning is not separated).

        `constrained`: `constrain` says that the answer is calls, or one text in which markers are text. What is not
        parsed, or goes on with a message (`continued`), joins to the text of `prompt_ids`; other answers begin anew.
        `whole_calls`: see OutputStream.
        """
        context = prompt_ids if continued or not parse else ()
        formats = in_order(self.reasoning_format, self.tool_format if tools else None) if parse else []
        stages = [
            start_parser(fmt, prompt_tail, tools, constrained=constrained, owner=self._owner_of_format(fmt))
            for fmt in formats
        ]
        keep = frozenset[str]().union(*(fmt.keep_special for fmt in formats))
        return OutputStream(
            params,
            self.tokenizer.detokenizer(skip_special=skip_special, keep=keep, context=context),
            Stops(params.stop, include=include_stop),
            Chain(*stages) if stages else None,
            next((stage for stage in stages if hasattr(stage, "inside")), None),
            Usage(len(prompt_ids)),
            show_stop=include_stop,
            single_call=single_call,
            whole_calls=whole_calls,
            choices=self.choices,
        )

    def _owner_of_format(self, fmt: AnyFormat) -> str:
        kind = "tool_parser" if fmt is self.tool_format else "reasoning_parser"
        return next((owner_of(choice) for choice in self.choices if choice.kind == kind), "")


def _renderer(
    resolved: ResolvedPlan, tokenizer: Tokenizer, template: str | None, formats: Sequence[Any]
) -> ChatRenderer | None:
    """For the user's or a plugin's `template`, or else for those of the checkpoint or its tokenizer's ChatWriter."""
    source = template or tokenizer.chat_template
    tools_source = None if template else tokenizer.tools_template
    control = {tokenizer.piece(token).decode(errors="replace") for token in tokenizer.special_ids}
    kept = [text for fmt in formats if fmt is not None for text in fmt.keep_special]
    control |= tokenizer.markers([*(text for text in (source, tools_source) if text), *kept])
    if source:
        return open_renderer(
            resolved, source, tokenizer.template_variables(),
            tools_source=tools_source, control_tokens=control, tokenizer=tokenizer,
        )  # fmt: skip
    if tokenizer.chat_writer is None:
        return None
    renderer = WriterRenderer(tokenizer.chat_writer, control)
    assert renderer.findings  # found out now, and not in a request
    return renderer


def load_tokenizer(checkpoint: Checkpoint, resolved: ResolvedPlan, config: EngineConfig) -> Tokenizer:
    """What the plan has chosen. Raises CheckpointError, PluginError."""
    eos = resolved.value("eos_token_ids") or _eos_ids(checkpoint)
    folder, choice = tokenizer_directory(checkpoint, config.model), resolved.choice("tokenizer")
    if choice is None:
        raise _no_reader(folder)
    make = partial(load_target(choice), folder, eos_token_ids=eos, **choice.options)
    made: Tokenizer = ask(owner_of(choice), make, gives=Tokenizer)
    return made


def _no_reader(folder: Path) -> CheckpointError:
    """Nothing that is installed reads the tokenizer that is there, if one is."""
    if (folder / "tokenizer.json").is_file():
        fix = install_command("tokenizer", "json")
        return CheckpointError(f"nothing that is installed reads {folder / 'tokenizer.json'}", fix=fix)
    have = sorted(path.name for path in folder.glob("*token*")) if folder.is_dir() else []
    return CheckpointError(
        f"there is no tokenizer.json in {folder}" + (f" (found: {', '.join(have)})" if have else ""),
        fix="convert it once: transformers.AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
    )


def vocabulary(tokenizer: Tokenizer, eos_token_ids: Sequence[int], size: int) -> Vocabulary:
    """For grammar backends. `size`: columns of the model's logits."""
    pieces = [tokenizer.piece(token) for token in range(min(tokenizer.vocab_size, size))]
    return Vocabulary(pieces, frozenset(tokenizer.special_ids), tuple(eos_token_ids), size, tokenizer.encode_inner)


def tokenizer_directory(checkpoint: Checkpoint, model: ModelConfig) -> Path:
    """Where the tokenizer's files are: with the checkpoint, or in a directory or hub id of their own."""
    if model.tokenizer is None:
        return checkpoint.path
    path = Path(model.tokenizer)
    if path.is_dir() or model.tokenizer.count("/") != 1 or model.tokenizer.startswith((".", "/", "~")):
        return path.expanduser()
    from lmkit.checkpoint import download

    options = CheckpointOptions(cache_dir=model.cache_dir, offline=model.offline)
    return download(model.tokenizer, options, _TOKENIZER_FILES)


def format_of(resolved: ResolvedPlan, kind: str) -> Any:
    choice = resolved.choice(kind)
    if choice is None:
        return None
    return made_format(owner_of(choice), load_target(choice), **choice.options)


def _eos_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    if ids := end_ids(checkpoint.generation_config)[0]:
        return tuple(ids)
    value = checkpoint.config.get("eos_token_id")
    return tuple(v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int))
