"""Time is linear in the length of the text, for every format and texts made to be slow.

LMKIT_LINEAR sets their length (`nox -s parsers_long`: a megabyte, which must take less than a second).
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator

import pytest
from lmkit.plugins.host import PluginHost
from lmkit.plugins.switches import Switches
from lmkit.text.formats import AnyFormat, load_format, start_parser
from lmkit_testing.clock import least
from lmkit_testing.parsers import TOOLS, markers_of

SIZE = int(os.environ.get("LMKIT_LINEAR", "20000"))  # characters
NUM_TEXTS = 24
COARSE = 0.02  # seconds; of less the clock is too coarse to tell
SECONDS = 1e-6 if SIZE >= 1_000_000 else 4e-6  # per character; short runs are for the slope, on busy machines too
HOST = PluginHost(switches=Switches())
FORMATS = [(kind, name) for kind in ("tool_parser", "reasoning_parser") for name in HOST.names(kind)]
BITS = (
    "{", "}", "[", "]", '"', "\\", ",", "(", ")", "=", "f", " ", "\n", "1", "'", ":", "<", "\\u00", "f(a=1)", "f{a:1}",
    '{"name":', '{"name": "f"', '{"f": {"a": 1}}', '{"name": "f", "arguments": {}}', '"a": 1',
    '[{"name": "f", "arguments": {"a": [',
)  # fmt: skip


def texts(fmt: AnyFormat, seed: str) -> Iterator[str]:
    """One unit, repeated: parts of calls and markers of the format, whole and cut."""
    source, markers = random.Random(seed), markers_of(fmt)
    bits = [*BITS, *markers, *markers, *(m[:-1] for m in markers if len(m) > 1)]
    for _ in range(NUM_TEXTS):
        begin = source.choice(("", source.choice(bits)))
        unit = "".join(source.choices(bits, k=source.randint(1, 3)))
        yield (begin + unit * (SIZE // len(unit) + 1))[:SIZE]


def seconds(fmt: AnyFormat, text: str, num_pieces: int = 1) -> float:
    """CPU time, the least of some runs when it is long."""
    step = -(-len(text) // num_pieces)
    pieces = [text[i : i + step] for i in range(0, len(text), step)]

    def run() -> float:
        parser = start_parser(fmt, "", TOOLS)
        begin = time.process_time()
        for piece in pieces:
            parser.feed(piece)
        parser.flush()
        return time.process_time() - begin

    return least(run, COARSE)


@pytest.mark.parametrize(("kind", "name"), FORMATS)
@pytest.mark.one_in(6)
def test_time_is_linear(kind: str, name: str, count: Callable[..., None]) -> None:
    fmt = load_format(HOST, kind, name)
    for text in texts(fmt, f"{kind}:{name}"):
        for num_pieces in (1, 50):
            whole = seconds(fmt, text, num_pieces)
            assert whole < SECONDS * SIZE, f"{text[:80]!r}: {whole * 1e6 / SIZE:.2f} s for a megabyte"
            if whole > COARSE:
                part = seconds(fmt, text[: SIZE // 4], num_pieces)
                assert whole < 10 * part, f"{text[:80]!r}: {whole / part:.1f} times the time of a quarter"
    count("texts made to be slow", NUM_TEXTS)
