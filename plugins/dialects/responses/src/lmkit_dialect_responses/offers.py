"""Names of tools: the model is offered functions alone, whatever kinds of tools the client has.

A tool in a namespace is offered under one flat name, and a call of it is answered under the client's two names. A
custom tool, whose input is one text, is offered as a function with the parameter `input`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal

MAX_NAME = 64  # characters of a flat name
_OTHER = re.compile(r"[^\w.:/@$-]", re.ASCII)  # characters that tool formats may take for something else
_DIGEST = 8


@dataclass(frozen=True)
class Offer:
    """A tool as the client knows it."""

    name: str
    namespace: str | None = None
    kind: Literal["call", "custom", "search"] = "call"  # which items tell of its calls

    @property
    def names(self) -> dict[str, str]:
        """The fields of a call that name the tool."""
        return {"name": self.name} | ({"namespace": self.namespace} if self.namespace is not None else {})


class Offers:
    """The tools of one request by the names of their functions."""

    def __init__(self) -> None:
        self._tools: dict[str, Offer] = {}
        self._flat: dict[tuple[str, str], str] = {}  # (namespace, name) -> the name of the function

    def add(self, offer: Offer) -> str:
        """Offers the tool. Tools without a namespace come first: they keep their names. Returns the function's name."""
        name = offer.name
        if offer.namespace is not None:
            name = self.name_of(offer.namespace, offer.name)
            self._flat[offer.namespace, offer.name] = name
        self._tools[name] = offer
        return name

    def get(self, function: str) -> Offer:
        """The tool that a called function stands for."""
        return self._tools.get(function) or Offer(function)

    @property
    def whole(self) -> frozenset[str]:
        """The names of the functions whose calls have no form for arguments that are cut."""
        return frozenset(name for name, offer in self._tools.items() if offer.kind != "call")

    def names_in(self, namespace: str) -> list[str]:
        """The names of the functions for all tools of a namespace."""
        return [flat for (space, _), flat in self._flat.items() if space == namespace]

    def name_of(self, namespace: str | None, name: str) -> str:
        """The name of the function for a tool, also for one that is offered no longer."""
        if namespace is None:
            return name
        return self._flat.get((namespace, name)) or flat_name(namespace, name, self._tools)


def flat_name(namespace: str, name: str, taken: Collection[str]) -> str:
    """A function's name for a tool in a namespace: at most MAX_NAME characters, and not one of `taken`."""
    joined = _OTHER.sub("_", f"{namespace}{'' if namespace.endswith('_') else '__'}{name}")
    flat, attempt = joined, 0
    while len(flat) > MAX_NAME or flat in taken:
        digest = sha256(json.dumps([namespace, name, attempt]).encode()).hexdigest()[:_DIGEST]
        flat, attempt = f"{joined[: MAX_NAME - _DIGEST - 1]}_{digest}", attempt + 1
    return flat


def custom_function(
    name: str, description: str | None, syntax: str | None, definition: str | None
) -> dict[str, object]:
    """A function for a custom tool. A grammar of the input is told to the model, and not enforced."""
    words = [description or ""]
    if definition:
        words.append(f"The input is a text in this grammar ({syntax or 'grammar'}):\n{definition}")
    parameters = {
        "type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"],
        "additionalProperties": False,
    }  # fmt: skip
    return {"name": name, "description": "\n\n".join(filter(None, words)), "parameters": parameters}


def custom_arguments(text: str) -> str:
    """The arguments of a call of a custom tool that was given `text`."""
    return json.dumps({"input": text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """The text that a custom tool is given; arguments without an input are the text themselves."""
    try:
        text = json.loads(arguments or "{}")["input"]
    except (ValueError, RecursionError, LookupError, TypeError):
        return arguments
    return text if isinstance(text, str) else arguments


def search_arguments(arguments: str) -> object:
    """The arguments of a search for tools as the object that the client reads."""
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
