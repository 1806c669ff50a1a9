"""Steps run in one thread, in the order in which they were given, while the engine's own thread goes on."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from lmkit.api import load_target

UNIPROC = "lmkit_worker.uniproc:UniprocExecutor"


class ThreadExecutor:
    """Contract: lmkit.api.Executor. All methods but `inspect_adapter` are called from the engine's thread."""

    def __init__(self, config, resolved, checkpoint, progress=None, *, journal="", worker=UNIPROC):
        self._closing = ExitStack()
        self._journal = journal
        self._thread = ThreadPoolExecutor(1, "worker")
        self._closing.callback(self._thread.shutdown)
        self._begun = {}  # step -> when it began, and what comes of its forward pass
        try:
            self._inner = self._run(load_target(worker), config, resolved, checkpoint, progress)
        except BaseException:
            self._closing.close()
            raise
        self._closing.callback(lambda: self._run(self._inner.close))  # before the thread ends
        self.depth = self._inner.depth  # steps that may be in flight

    def _run(self, function, *arguments):
        return self._thread.submit(function, *arguments).result()

    def start(self):
        return self._run(self._inner.start)

    def configure_kv(self, kv, limits):
        self._run(self._inner.configure_kv, kv, limits)

    def forward(self, plan):
        """Returns at once."""
        self._begun[plan.step] = (time.time(), len(plan.rows), self._thread.submit(self._inner.forward, plan))

    def sample(self, step, masks):
        """Once after each `forward`, in order. The future carries what the step raised: in either half of it."""
        return self._thread.submit(self._sample, step, masks, *self._begun.pop(step))

    def _sample(self, step, masks, began, num_rows, forward):
        forward.result()
        result = self._inner.sample(step, masks).result()
        if self._journal:
            line = {"step": step, "rows": num_rows, "tokens": sum(map(len, result.tokens)), "began": began}
            with open(self._journal, "a") as file:
                print(json.dumps({**line, "seconds": round(time.time() - began, 6)}), file=file)
        return result

    def control(self, command):
        """What is in flight comes first, as all of it runs in the one thread."""
        return self._run(self._inner.control, command)

    def inspect_adapter(self, path):
        """From any thread, also during a step."""
        return self._inner.inspect_adapter(path)

    def on_failure(self, callback):
        self._inner.on_failure(callback)

    def close(self):
        """Idempotent: what was closed is forgotten."""
        self._closing.close()
