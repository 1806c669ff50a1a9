"""/invocations: one route for whatever the model does. What a body asks for is told by the names in it."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Collection
from dataclasses import replace

import msgspec
from lmkit_http.dialect import Answer, Dialect, Incoming, Served
from lmkit_http.shape import check_shape
from lmkit_http.strict import MAX_IDS, InvalidBody

# names that a body has -> the route that takes such bodies; the first that fits
_ROUTES = (
    ({"messages"}, "POST /v1/chat/completions"),
    ({"prompt"}, "POST /v1/completions"),
    ({"query", "documents"}, "POST /v1/rerank"),
    ({"query", "texts"}, "POST /rerank"),
    ({"queries", "documents"}, "POST /v1/score"),
    ({"text_1", "text_2"}, "POST /v1/score"),
    ({"input", "task"}, "POST /pooling"),
)


class SageMaker(Dialect):
    keeps = False
    routes = ("POST /invocations",)
    light_routes = ("GET /ping", "POST /ping")

    def parse(self, incoming: Incoming, served: Served) -> Answer | Incoming:
        if incoming.route in self.light_routes:
            return Answer(b"")
        check_shape(incoming.body, MAX_IDS)
        try:
            names = msgspec.json.decode(incoming.body.removeprefix(BOM_UTF8), type=dict[str, msgspec.Raw]).keys()
        except msgspec.DecodeError:
            raise InvalidBody("the body is not a JSON object") from None
        return replace(incoming, route=_route(names, served))


def _route(names: Collection[str], served: Served) -> str:
    """Raises InvalidBody."""
    for needed, route in _ROUTES:
        if needed <= set(names):
            return route
    if "input" in names:
        classifies = served.pooler is not None and served.pooler.task == "classify"
        return "POST /classify" if classifies else "POST /v1/embeddings"
    raise InvalidBody("the body has none of messages, prompt, input, or query with documents: nothing is asked")
