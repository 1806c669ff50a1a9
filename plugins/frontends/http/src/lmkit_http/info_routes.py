"""The routes that do not generate: models, tokens, health, metrics."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast
from uuid import uuid4

import lmkit
import msgspec
from lmkit.api import EngineBusy, EngineDead, InvalidParam
from lmkit.engine.messages import SetProfile
from lmkit_python.front.ask import ChatAsk
from lmkit_python.front.limits import check_texts, strings
from starlette.requests import Request
from starlette.responses import Response

from lmkit_http.access import caller_of
from lmkit_http.errors import HttpError
from lmkit_http.explain import story
from lmkit_http.history import MAX_ENTRIES
from lmkit_http.info_schema import (
    DetokenizeRequest,
    LoadAdapterRequest,
    ProfileRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from lmkit_http.limits import values_limit
from lmkit_http.load import SOON, STATS_WAIT, engine_stats, load
from lmkit_http.messages import conversation, declared
from lmkit_http.page import page
from lmkit_http.strict import check_calls, parse

if TYPE_CHECKING:
    from lmkit_http.backend import Backend

Result = TypeVar("Result")
Handler = Callable[[Request], Awaitable[Response]]
_LISTED = 50  # requests of /debug/requests
_MORE = 4  # times the context that may be tokenized


def routes(backend: Backend | None) -> list[tuple[str, list[str], Handler]]:
    """(path, methods, handler). Without a backend: all that there may be, none of which can be asked."""
    r = _Routes(backend)
    return [
        ("/v1/models", ["GET"], r.models),
        ("/v1/models/{name:path}", ["GET"], r.model),
        *(r.adapter_routes() if backend is None or backend.facts.loads_adapters else []),
        ("/tokenize", ["POST"], r.tokenize),
        ("/detokenize", ["POST"], r.detokenize),
        ("/live", ["GET"], r.live),
        ("/ready", ["GET"], r.ready),
        ("/health", ["GET"], r.health),
        ("/version", ["GET"], r.version),
        ("/load", ["GET"], r.load),
        ("/tokenizer_info", ["GET"], r.tokenizer_info),
        ("/metrics", ["GET"], r.metrics),
        ("/debug/plan", ["GET"], r.plan),
        ("/debug/startup", ["GET"], r.startup),
        ("/debug/requests", ["GET"], r.requests),
        ("/debug/requests/{id:path}", ["GET"], r.request),
        ("/start_profile", ["POST"], r.start_profile),
        ("/stop_profile", ["POST"], r.stop_profile),
        ("/", ["GET"], r.page),
    ]


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


class _Routes:
    def __init__(self, backend: Backend | None) -> None:
        self._backend = cast("Backend", backend)

    def _model(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", **self._backend.served.about}

    async def models(self, request: Request) -> Response:
        own = [self._model(name) for name in self._backend.names]
        return _json({"object": "list", "data": own + [self._adapter(name) for name in sorted(self._backend.adapters)]})

    def _adapter(self, name: str) -> dict[str, Any]:
        return {**self._model(name), "root": name, "parent": self._backend.model}

    def adapter_routes(self) -> list[tuple[str, list[str], Handler]]:
        """Off unless the engine was told that adapters may come and go."""
        return [
            ("/v1/load_lora_adapter", ["POST"], self.load_adapter),
            ("/v1/unload_lora_adapter", ["POST"], self.unload_adapter),
        ]

    async def load_adapter(self, request: Request) -> Response:
        caller_of(request.scope).need_admin("loading an adapter")
        r = await self._parsed(request, partial(parse, LoadAdapterRequest))
        if r.lora_name in self._backend.names:
            raise InvalidParam("lora_name", r.lora_name, "a name other than the model's own")
        if r.lora_name in self._backend.adapters and not r.load_inplace:
            raise InvalidParam("lora_name", r.lora_name, "a new name, or load_inplace=true to replace the adapter")
        await self._backend.client.set_adapter(r.lora_name, r.lora_path)
        self._backend.adapters.add(r.lora_name)
        await self._spread()
        return _json({"loaded": r.lora_name})

    async def unload_adapter(self, request: Request) -> Response:
        caller_of(request.scope).need_admin("unloading an adapter")
        r = await self._parsed(request, partial(parse, UnloadAdapterRequest))
        await self._backend.client.set_adapter(r.lora_name, None)
        self._backend.adapters.discard(r.lora_name)
        await self._spread()
        return _json({"unloaded": r.lora_name})

    async def _spread(self) -> None:
        """Whichever process the next request comes to knows of it."""
        if self._backend.spread is not None:
            await self._backend.spread()

    async def start_profile(self, request: Request) -> Response:
        """Records the next steps; ends by itself."""
        folder = self._profile_dir(request)
        r = await self._parsed(request, lambda body: parse(ProfileRequest, body or b"{}"))
        path = folder / f"{r.profile_prefix}-{time.strftime('%Y%m%d-%H%M%S')}-{uuid4().hex[:6]}"
        await self._backend.client.change(SetProfile(str(path), r.max_iterations))
        return _json({"files": f"{path}-rank*.json.gz", "max_iterations": r.max_iterations})

    async def stop_profile(self, request: Request) -> Response:
        self._profile_dir(request)
        await self._backend.client.change(SetProfile("", 0))
        return _json({"stopped": True})

    def _profile_dir(self, request: Request) -> Path:
        """Raises HttpError."""
        if not self._backend.settings.profile_dir:
            raise HttpError(404, "off", "this server records no steps", fix="start it with --profile-dir DIR")
        caller_of(request.scope).need_admin("profiling")
        return Path(self._backend.settings.profile_dir)

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._backend.check_model(name)
        return _json(self._adapter(name) if name in self._backend.adapters else self._model(name))

    async def tokenize(self, request: Request) -> Response:
        return await self._parsed(request, self._tokenize)

    async def _parsed(self, request: Request, work: Callable[[bytearray], Result]) -> Result:
        """What `work` makes of the body, in a thread."""
        async with self._backend.bodies.read(request) as body:
            return await self._backend.workers.run(len(body), work, body)

    def _tokenize(self, body: bytearray) -> Response:
        r, text = parse(TokenizeRequest, body), self._backend.text
        self._backend.check_model(r.model)
        if (r.prompt is None) == (r.messages is None):
            raise HttpError(400, "invalid-request", "give either prompt or messages", field="prompt")
        if r.messages is not None:
            check_calls(r.messages)
            read, dropped = self._backend.served.words, set[str]()
            ask = ChatAsk(
                messages=conversation(r.messages, read, dropped),
                tools=declared(r.tools or (), read, dropped),
                continue_final=bool(r.continue_final_message),
            )
            self._check_texts(strings([ask.messages, ask.tools, r.chat_template_kwargs]))
            prompt = text.render_chat(
                ask.messages, ask.tools, r.chat_template_kwargs, r.add_generation_prompt is not False,
                ask.continue_final,
            )  # fmt: skip
            self._check_texts([prompt])
            ids = text.encode_prompt(prompt, add_special=bool(r.add_special_tokens))
        else:
            self._check_texts([r.prompt or ""])
            ids = text.encode_prompt(r.prompt or "", add_special=r.add_special_tokens is not False)
        answer = {"count": len(ids), "max_model_len": self._backend.facts.max_length, "tokens": ids}
        if r.return_token_strs:
            answer["token_strs"] = [text.tokenizer.piece(i).decode(errors="replace") for i in ids]
        return _json(answer)

    def _check_texts(self, texts: Iterable[str]) -> None:
        """Texts may be longer than the context: that is what a client wants to know."""
        check_texts(self._backend.text.tokenizer, texts, self._backend.facts, _MORE)

    async def detokenize(self, request: Request) -> Response:
        return await self._parsed(request, self._detokenize)

    def _detokenize(self, body: bytearray) -> Response:
        r = parse(DetokenizeRequest, body, values_limit(self._backend.facts, self._backend.settings))
        self._backend.check_model(r.model)
        size = self._backend.facts.vocab_size
        if size and max(r.tokens, default=0) >= size:
            raise InvalidParam("tokens", max(r.tokens), f"token ids below {size}")
        return _json({"prompt": self._backend.text.decode_all(r.tokens)})

    async def live(self, request: Request) -> Response:
        return _json({"status": "live"})

    async def ready(self, request: Request) -> Response:
        self._backend.check_open()
        if (state := self._backend.life.last) != "running":
            raise EngineBusy(f"the engine is {state}", fix="an administrator resumes it, or wakes it up")
        if not self._backend.client.responsive:
            raise EngineDead("the engine does not answer", fix="try again in a while")
        return _json({"status": "ready"})

    async def health(self, request: Request) -> Response:
        """Deeper than /ready: the engine thread itself answers."""
        self._backend.check_open()
        if await engine_stats(self._backend.client) is None:
            raise EngineDead(f"the engine did not answer within {STATS_WAIT} s")
        return _json({"status": "ok", "active": self._backend.admission.total()})

    async def load(self, request: Request) -> Response:
        """For balancers: how many requests this server is answering, and what the engine says when it says it soon."""
        stats = await engine_stats(self._backend.client, SOON)
        return _json(
            {"server_load": self._backend.admission.total(), **(load(stats.sched) if stats is not None else {})}
        )

    async def tokenizer_info(self, request: Request) -> Response:
        """What a client needs to count and to render as this server does."""
        text = self._backend.text
        tokenizer, renderer = text.tokenizer, text.renderer
        return _json({
            "vocab_size": tokenizer.vocab_size, "model_max_length": self._backend.facts.max_length,
            "bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token,
            "eos_token_ids": list(tokenizer.eos_token_ids),
            "special_ids": sorted(tokenizer.special_ids),
            "chat_template": tokenizer.chat_template if renderer is not None else None,
        })  # fmt: skip

    async def version(self, request: Request) -> Response:
        return _json({"version": lmkit.__version__})

    async def metrics(self, request: Request) -> Response:
        stats = await engine_stats(self._backend.client)
        client = self._backend.client
        await self._backend.metrics.gather()
        content = self._backend.metrics.render(stats, client.state == "ready" and client.responsive)
        return Response(content, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def plan(self, request: Request) -> Response:
        """What was chosen, and why: the ResolvedPlan."""
        if self._backend.plan is None:
            raise HttpError(404, "not-found", "this server was built without a resolved plan")
        return Response(self._backend.plan.to_json(), media_type="application/json")

    async def startup(self, request: Request) -> Response:
        """How long each phase of the start-up took, in seconds; they sum to the time until ready."""
        return _json({"phases": self._backend.startup})

    async def requests(self, request: Request) -> Response:
        """The newest requests that the caller may see: their ids."""
        self._remembered()
        caller = caller_of(request.scope)
        seen = islice((entry for entry in self._backend.history if entry.seen_by(caller)), _LISTED)
        return _json({"requests": [
            {"id": e.id, "request_id": e.request_id, "route": e.route, "at": e.at,
             "finish": [life.finish for life in e.lives], "seconds": max((life.total for life in e.lives), default=0.0)}
            for e in seen
        ]})  # fmt: skip

    async def request(self, request: Request) -> Response:
        """The story of one request, running or not. Those of others are not found."""
        self._remembered()
        id, caller = request.path_params["id"], caller_of(request.scope)
        entry = self._backend.history.find(id, caller)
        if entry is None:
            raise HttpError(
                404, "not-found", f"no request {id[:200]!r} is remembered",
                fix=f"the last {MAX_ENTRIES} are, by their id or x-request-id; /debug/requests lists them",
            )  # fmt: skip
        return _json(story(self._backend, entry, caller))

    def _remembered(self) -> None:
        """Raises HttpError where each process remembers only what it has answered."""
        if self._backend.part is not None:
            raise HttpError(404, "off", "requests are not remembered by several processes", fix="--api-workers 1")

    async def page(self, request: Request) -> Response:
        """A small chat page, all in one file."""
        return page()
