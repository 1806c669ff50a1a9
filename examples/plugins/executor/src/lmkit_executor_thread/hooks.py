"""Registers the executor `thread`."""

from dataclasses import dataclass

from lmkit.api import ExecutorSpec, Tier, hookimpl


@dataclass(frozen=True, slots=True)
class Options:
    """--executor.thread.journal FILE and so on; what they are is checked, and an error names the option."""

    journal: str = ""  # a line of JSON is written there for each step
    worker: str = "lmkit_worker.uniproc:UniprocExecutor"  # what runs in the thread: an executor, as a plugin names it

    def __post_init__(self):
        if ":" not in self.worker:
            raise ValueError(f"worker is {self.worker!r}, needs module:Class")


@hookimpl
def lmkit_executors():
    yield ExecutorSpec(
        name="thread",
        interface=1,
        summary="One worker, in a thread beside the engine's",
        target="lmkit_executor_thread.executor:ThreadExecutor",
        options="lmkit_executor_thread.hooks:Options",
        tier=Tier.REFERENCE,
        max_ranks=1,
    )
