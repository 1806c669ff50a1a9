"""The four best outputs that a beam search finds: python examples/python_api/beam_search.py [MODEL]"""

import sys

from lmkit import LLM, BeamSearchParams


def main(model: str = "demo") -> None:
    with LLM(model) as llm:
        (output,) = llm.beam_search("What is 2 + 3?", BeamSearchParams(beam_width=4, max_tokens=16))
        for found in output.sequences:
            print(f"{found.score:8.3f} {found.text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
