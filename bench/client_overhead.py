"""CPU of the front end's process per streamed token: frames of one step to the coroutines that wait for them.

python bench/client_overhead.py            64 streams, 2000 steps
"""

from __future__ import annotations

import argparse
import asyncio
from time import process_time

from lmkit.api import EngineRequest, SamplingParams, TokenEvent
from lmkit.engine.messages import EngineFacts, Events, Ready, Splitter, decode_report, encode
from lmkit.engine.streams import BaseClient


class Loopback(BaseClient):
    """A client whose engine is the benchmark."""

    def _send(self, command: object) -> None:
        encode(command)  # type: ignore[arg-type]

    async def start(self) -> None:
        self._receive(Ready(EngineFacts("bench", 4096, 1 << 20, 1000)))

    async def close(self) -> None:
        self._die(None)


async def measure(num_streams: int, num_steps: int) -> float:
    """Seconds of CPU per token, from bytes of the socket to the consumer's loop body."""
    client, splitter = Loopback(), Splitter()
    await client.start()
    streams = [client.submit(EngineRequest(f"request-{i}", [1, 2, 3], SamplingParams())) for i in range(num_streams)]

    async def consume(stream: object) -> int:
        return sum([len(event.tokens) async for event in stream])  # type: ignore[attr-defined]

    consumers = [asyncio.ensure_future(consume(stream)) for stream in streams]
    await asyncio.sleep(0)
    frame = encode(Events([TokenEvent(stream.id, [7]) for stream in streams]))
    last = encode(Events([TokenEvent(stream.id, [7], finish="length") for stream in streams]))
    began = process_time()
    for step in range(num_steps):
        for payload in splitter.feed(frame if step < num_steps - 1 else last):
            client._receive(decode_report(payload))
        await asyncio.sleep(0)
    counts = await asyncio.gather(*consumers)
    seconds = process_time() - began
    assert counts == [num_steps] * num_streams
    return seconds / (num_streams * num_steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    for streams in (1, args.streams):
        seconds = asyncio.run(measure(streams, args.steps))
        print(f"{streams:4d} streams: {seconds * 1e6:.2f} us of CPU per token")


if __name__ == "__main__":
    main()
