"""Greedy tokens by llama.cpp: `pip install llama-cpp-python`, then

python tests/quant_parity/tokens_of_llamacpp.py FILE.gguf PROMPTS.json [NUMBER]

PROMPTS.json: {"prompts": [[token, ...], ...]}; "tokens" are put beside them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from llama_cpp import Llama

model, file, *rest = sys.argv[1:]
number = int(rest[0]) if rest else 24
content = json.loads(Path(file).read_text())
llm = Llama(model, n_ctx=1024, logits_all=True, verbose=False)
content["tokens"] = []
for prompt in content["prompts"]:
    llm.reset()
    llm.eval(prompt)
    found = []
    for _ in range(number):
        token = int(llm.scores[llm.n_tokens - 1].argmax())
        found.append(token)
        llm.eval([token])
    content["tokens"].append(found)
Path(file).write_text(json.dumps(content) + "\n")
