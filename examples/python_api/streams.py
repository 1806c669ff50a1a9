"""Several texts at once, each as it is made: python examples/python_api/streams.py [MODEL]"""

import asyncio
import sys

from lmkit import AsyncLLM, SamplingParams


async def main(model: str = "demo") -> None:
    params = SamplingParams(max_tokens=16, temperature=0.0)
    async with AsyncLLM(model) as llm:

        async def show(prompt: str) -> None:
            pieces = [text async for text in llm.stream_text(prompt, params)]
            print(prompt, "->", "|".join(pieces))

        await asyncio.gather(show("What is 2 + 3?"), show("Tell me"))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
