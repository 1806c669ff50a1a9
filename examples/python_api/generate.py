"""Texts, a chat and texts as they are made: python examples/python_api/generate.py [MODEL]"""

import sys

from lmkit import LLM, SamplingParams


def main(model: str = "demo") -> None:
    params = SamplingParams(max_tokens=16, temperature=0.0)
    with LLM(model) as llm:
        for output in llm.generate(["What is 2 + 3?", "Tell me"], params, progress=False):
            print(output.prompt, "->", output.text)
        (answer,) = llm.chat([{"role": "user", "content": "What is 2 + 3?"}], params)
        print("chat:", answer.text)
        for text in llm.stream_text("Tell me", params):
            print(text, end="", flush=True)
        print()


if __name__ == "__main__":
    main(*sys.argv[1:])
