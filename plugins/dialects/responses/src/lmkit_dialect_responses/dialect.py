"""The dialect `responses`: its routes, and the answers that it keeps."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from lmkit.api import ErrorInfo, InvalidParam
from lmkit_http.dialect import Answer, Dialect, Exchange, Incoming, Served, UnsupportedField
from lmkit_http.strict import parse

from lmkit_dialect_responses.answer import Count, Respond, conversation_ask
from lmkit_dialect_responses.background import Ask, Desk, Later
from lmkit_dialect_responses.compact import Compact
from lmkit_dialect_responses.conversation import Reader
from lmkit_dialect_responses.history import answered, items_of, listed
from lmkit_dialect_responses.replay import replayed
from lmkit_dialect_responses.schema import CountRequest, ResponsesRequest
from lmkit_dialect_responses.servers import Servers
from lmkit_dialect_responses.store import Store, progress

CREATE, COUNT = "POST /v1/responses", "POST /v1/responses/input_tokens"
COMPACT = "POST /v1/responses/compact"
REQUESTS: Mapping[str, type[CountRequest]] = {CREATE: ResponsesRequest, COUNT: CountRequest, COMPACT: CountRequest}
ONE, DELETE = "GET /v1/responses/{id}", "DELETE /v1/responses/{id}"
ITEMS, CANCEL = "GET /v1/responses/{id}/input_items", "POST /v1/responses/{id}/cancel"
_PAGE, _MOST = 20, 100  # items of a list
_LAST = (1 << 31) - 1  # the number of an event after which there is none
_encode = msgspec.json.encode


class Responses(Dialect):
    routes = tuple(REQUESTS)
    light_routes = (ONE, DELETE, ITEMS, CANCEL)

    def __init__(self, mcp: str = "", mcp_seconds: float = 60.0, store: Store | None = None) -> None:
        """`mcp`: a file of MCP servers whose tools may be used; "": there are none. Raises ConfigError."""
        self._store = store or Store()
        self._desk = Desk(self._store)
        self._servers = Servers.read(Path(mcp).expanduser(), mcp_seconds) if mcp else Servers()

    async def work(self, answer: Ask) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._desk.work(answer))
            tasks.create_task(self._servers.run())

    def parse(self, incoming: Incoming, served: Served) -> Exchange | Answer:
        if incoming.route == ONE and incoming.query.get("stream", "false").lower() not in ("false", "0", ""):
            return self._streamed(incoming)
        if incoming.route not in self.routes:
            return Answer(self._kept(incoming))
        request = parse(REQUESTS[incoming.route], incoming.body, served.max_values, served.lenient)
        request.model = request.model or None
        served.check_model(request.model)
        request.check()
        if isinstance(request, ResponsesRequest):
            return self._respond(incoming, request, served)
        if incoming.route == COMPACT:
            items, _ = items_of(request, self._store, incoming.tenant)
            return Compact(conversation_ask(request, served, items, Reader(request.dropped)), items, served)
        return Count(request, served, self._store, incoming.tenant, self._servers)

    def _respond(self, incoming: Incoming, request: ResponsesRequest, served: Served) -> Exchange | Answer:
        if isinstance(incoming, Later):
            self._desk.begin(incoming)
            return Respond(request, served, self._store, incoming.tenant, self._servers, incoming.id)
        respond = Respond(request, served, self._store, incoming.tenant, self._servers)
        if not request.background:
            return respond
        kept = respond.queued()
        # its body is the server's again when this request has been answered
        self._desk.accept(kept, Later(CREATE, bytes(incoming.body), tenant=incoming.tenant, id=kept.id))
        return Answer(kept.body, headers=respond.headers)

    def _kept(self, incoming: Incoming) -> bytes:
        """Raises RequestError."""
        id, tenant = incoming.path["id"], incoming.tenant
        if incoming.route == DELETE:
            self._store.delete(tenant, id)
            self._desk.give_up(id)
            return _encode({"id": id, "object": "response", "deleted": True})
        kept = self._store.get(tenant, id)
        if incoming.route == ITEMS:
            chain = self._store.chain(tenant, id)
            before = [item for one in chain[:-1] for item in listed(one) + answered(one)]
            return _page(before + listed(kept), incoming)
        if incoming.route == CANCEL:
            if not progress(kept).background:
                raise UnsupportedField(
                    "id", "only answers in the background can be cancelled",
                    fix="close the connection of a request to end it",
                )  # fmt: skip
            self._desk.cancel(tenant, id)
            return self._store.get(tenant, id).body
        return kept.body

    def _streamed(self, incoming: Incoming) -> Answer:
        """An answer that has ended, as events. Raises RequestError."""
        kept = self._store.get(incoming.tenant, incoming.path["id"])
        if progress(kept).status not in ("completed", "incomplete", "failed"):
            raise UnsupportedField(
                "stream", "only an answer that has ended is told as a stream", fix="leave stream out, and ask again"
            )
        after = incoming.query.get("starting_after") or "-1"
        if not re.fullmatch(r"-1|\d{1,9}", after, re.ASCII):
            raise InvalidParam("starting_after", after[:100], "the sequence_number of an event")
        return Answer(replayed(msgspec.json.decode(kept.body), int(after)), media_type=self.stream_type)

    def error_chunk(self, info: ErrorInfo) -> bytes:
        """As the API describes it, and with `error`, by which its official client knows errors."""
        error = msgspec.json.decode(self.error(info))["error"]
        flat = {name: error[name] for name in ("code", "message", "param")}
        return b"event: error\ndata: %b\n\n" % _encode(
            {"type": "error", **flat, "error": error, "sequence_number": _LAST}
        )


def _page(items: list[dict[str, Any]], incoming: Incoming) -> bytes:
    """Part of a list, the latest items first unless the query says otherwise. Raises RequestError."""
    query = incoming.query
    limit, order, after = query.get("limit") or str(_PAGE), query.get("order") or "desc", query.get("after")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= _MOST):
        raise InvalidParam("limit", limit[:100], f"a number from 1 to {_MOST}")
    if order not in ("asc", "desc"):
        raise InvalidParam("order", order[:100], "'asc' or 'desc'")
    found = items if order == "asc" else items[::-1]
    if after:
        ids = [item["id"] for item in found]
        if after not in ids:
            raise InvalidParam("after", after[:100], "the id of one of the items")
        found = found[ids.index(after) + 1 :]
    page = found[: int(limit)]
    ends = {"first_id": page[0]["id"] if page else "", "last_id": page[-1]["id"] if page else ""}
    return _encode({"object": "list", "data": page, "has_more": len(page) < len(found), **ends})
