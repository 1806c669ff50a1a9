"""An engine step by step, for programs that have a loop of their own: python examples/python_api/steps.py [MODEL]"""

import sys

from lmkit import LLM, LLMEngine, SamplingParams


def main(model: str = "demo") -> None:
    params = SamplingParams(max_tokens=16, temperature=0.0)
    with LLM(model) as llm, LLMEngine(llm) as engine:
        engine.add_request("a", "What is 2 + 3?", params)
        engine.add_request("b", "Tell me", params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                print(output.request_id, output.text, "(all)" if output.finished else "")


if __name__ == "__main__":
    main(*sys.argv[1:])
