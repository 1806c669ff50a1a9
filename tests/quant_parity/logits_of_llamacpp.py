"""Logits by llama.cpp: `pip install llama-cpp-python`, then

python tests/quant_parity/logits_of_llamacpp.py FILE.gguf OUT.npy TOKEN TOKEN ...

OUT.npy: float32 [tokens, vocabulary].
"""

from __future__ import annotations

import sys

import numpy as np
from llama_cpp import Llama

model, out, *tokens = sys.argv[1:]
llm = Llama(model, n_ctx=64, n_threads=1, logits_all=True, verbose=False)
llm.eval([int(token) for token in tokens])
np.save(out, np.array(llm.scores[: len(tokens)], np.float32))
