"""The result of a step that has not been read yet. No torch here: an executor's parent needs it, too."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from lmkit.api import StepResult


class StepFuture(Future[StepResult]):
    """The result of a step, read in the thread that asks for it: the one that runs the steps."""

    def __init__(self, read: Callable[[], StepResult]) -> None:
        super().__init__()
        self._read = read

    def result(self, timeout: float | None = None) -> StepResult:
        if not self.done():
            try:
                self.set_result(self._read())
            except Exception as e:
                self.set_exception(e)
        return super().result(timeout)
