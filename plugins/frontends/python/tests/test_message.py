"""Message: whatever is fed at a time, the whole is the sum of its changes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from lmkit.api import ParseWarning, Reasoning, Text, TokenLogprob, ToolArgs, ToolCut, ToolEnd, ToolStart
from lmkit.text.stream import Finish, Logprobs, OutputEvent, Usage
from lmkit_python.front.message import Change, Message

PIECES = st.text("ab ", min_size=1, max_size=3)


@st.composite
def outputs(draw: st.DrawFn) -> list[OutputEvent]:
    """Events of one choice, in an order that parsers make."""
    events: list[OutputEvent] = []
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["text", "reasoning", "call", "logprobs", "warning"]))
        if kind == "text":
            events.append(Text(draw(PIECES)))
        elif kind == "reasoning":
            events.append(Reasoning(draw(PIECES)))
        elif kind == "logprobs":
            events.append(Logprobs([TokenLogprob(1, -1.0, 1, [])], [draw(st.integers(0, 9))]))
        elif kind == "warning":
            events.append(ParseWarning("odd"))
        else:
            index = sum(isinstance(e, ToolStart) for e in events)
            events.append(ToolStart(index, f"c{index}", draw(st.sampled_from("fg"))))
            events += [ToolArgs(index, piece) for piece in draw(st.lists(PIECES, max_size=3))]
            events.append(draw(st.sampled_from([ToolEnd(index), ToolCut(index, "text")])))
    return [*events, Finish("stop", None, Usage(1))]


def state(message: Message) -> tuple[object, ...]:
    calls = [(c.id, c.name, c.arguments, c.complete) for c in message.calls]
    return (message.content, message.reasoning, calls, message.logprobs, message.offsets, message.finish)  # fmt: skip


@given(outputs(), st.data())
def test_the_whole_is_the_sum_of_its_changes(events: list[OutputEvent], data: st.DataObject) -> None:
    whole = Message()
    whole.feed(events)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(events)))) | {0, len(events)})
    fed, added = Message(), Message()
    changes: list[Change] = []
    for begin, end in pairwise(cuts):
        changes.append(fed.feed(events[begin:end]))
    for change in changes:
        added.add(change)
    assert state(whole) == state(fed) == state(added)
    assert whole.content == "".join(e.text for e in events if isinstance(e, Text))
    assert whole.reasoning == "".join(e.text for e in events if isinstance(e, Reasoning))
    assert [c.complete for c in whole.calls] == [
        isinstance(e, ToolEnd) for e in events if isinstance(e, ToolEnd | ToolCut)
    ]
    assert "".join(c.arguments for c in whole.calls) == "".join(
        e.json_fragment for e in events if isinstance(e, ToolArgs)
    )
    assert [part.kind for part in fed.parts if part.kind == "call"] == ["call"] * len(whole.calls)
    for one, next_ in pairwise(fed.parts):  # what follows in the same kind is the same part
        assert one.kind == "call" or one.kind != next_.kind
