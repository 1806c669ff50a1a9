"""llama.cpp through the bindings of llama-cpp-python: its own decode loop on batches of token ids."""

from __future__ import annotations

import ctypes

import llama_cpp as c
import numpy as np
from protocol import Clock, Load, serve

BATCH, MICRO_BATCH = 2048, 512  # llama.cpp's defaults


class LlamaCpp:
    def __init__(self, load: Load) -> None:
        c.llama_backend_init()
        c.llama_log_set(_silent, ctypes.c_void_p(0))
        model = c.llama_model_load_from_file(load.model.encode(), c.llama_model_default_params())
        if not model:
            raise ValueError(f"llama.cpp cannot load {load.model}")
        params = c.llama_context_default_params()
        params.n_ctx = load.max_rows * (-(-load.max_length // 256) * 256)
        params.n_batch, params.n_ubatch = BATCH, MICRO_BATCH
        params.n_seq_max = load.max_rows
        params.n_threads = params.n_threads_batch = load.threads
        params.kv_unified = True
        self.context = c.llama_init_from_model(model, params)
        if not self.context:
            raise ValueError("llama.cpp cannot make a context")
        self.memory = c.llama_get_memory(self.context)
        self.vocab = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))
        self.batch = c.llama_batch_init(BATCH, 0, 1)
        self.held: list[int] = []  # what the cache holds of a lone request, as llama-server keeps it

    def run(self, prompts: list[list[int]], tokens: int) -> list[list[float]]:
        clock = Clock()
        times: list[list[float]] = [[] for _ in prompts]
        last, lengths = self._prefill(prompts), [len(p) for p in prompts]
        for row_times in times:
            row_times.append(clock())
        output = [last[0]]
        for _ in range(tokens - 1):
            self._fill([(token, lengths[row], row, True) for row, token in enumerate(last)])
            last = [self._argmax(row) for row in range(len(prompts))]
            lengths = [n + 1 for n in lengths]
            now = clock()
            for row_times in times:
                row_times.append(now)
            output.append(last[0])
        self.held = prompts[0] + output[:-1] if len(prompts) == 1 else []
        return times

    def _prefill(self, prompts: list[list[int]]) -> list[int]:
        """The first token of each prompt. A lone prompt goes on where the one before has the same beginning."""
        same = 0
        if len(prompts) == 1:
            limit = min(len(self.held), len(prompts[0]) - 1)
            same = next((i for i in range(limit) if self.held[i] != prompts[0][i]), limit)
        if same:
            c.llama_memory_seq_rm(self.memory, 0, same, -1)
        else:
            c.llama_memory_clear(self.memory, True)
        entries = [
            (token, at, row, at == len(prompt) - 1)
            for row, prompt in enumerate(prompts)
            for at, token in enumerate(prompt)
            if at >= same
        ]
        first: dict[int, int] = {}
        for start in range(0, len(entries), BATCH):
            part = entries[start : start + BATCH]
            self._fill(part)
            for index, (_, _, row, wanted) in enumerate(part):
                if wanted:
                    first[row] = self._argmax(index)
        return [first[row] for row in range(len(prompts))]

    def _fill(self, entries: list[tuple[int, int, int, bool]]) -> None:
        """Decodes (token, position, row, whether its logits are wanted)."""
        batch = self.batch
        batch.n_tokens = len(entries)
        for i, (token, position, row, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
        status = c.llama_decode(self.context, batch)
        if status:
            raise ValueError(f"llama_decode returned {status}")

    def _argmax(self, index: int) -> int:
        logits = c.llama_get_logits_ith(self.context, index)
        return int(np.argmax(np.ctypeslib.as_array(logits, (self.vocab,))))


@c.llama_log_callback
def _silent(level: int, text: bytes, data: object) -> None:
    pass


if __name__ == "__main__":
    serve(LlamaCpp)
