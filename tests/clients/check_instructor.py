"""instructor in the modes that do not depend on what a small model makes of an instruction."""

from __future__ import annotations

from typing import Any

import instructor
import openai
import pytest
from pydantic import BaseModel

ASKED = [{"role": "user", "content": 'Write JSON with the keys "name" and "age" for Anna, who is 31.'}]
MODES = [instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA]


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(params=MODES, ids=str)
def client(url: str, request: pytest.FixtureRequest) -> Any:
    return instructor.from_openai(
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=request.param
    )


OPTIONS: dict[str, Any] = {"model": "demo", "messages": ASKED, "temperature": 0, "max_tokens": 200, "max_retries": 0}


def test_create(client: Any) -> None:
    assert isinstance(client.chat.completions.create(response_model=Person, **OPTIONS), Person)


def test_partial_streamed(client: Any) -> None:
    *_, last = client.chat.completions.create_partial(response_model=Person, **OPTIONS)
    assert isinstance(last.age, int)
