"""What steps do, as torch's profiler sees it: a trace for chrome://tracing or Perfetto."""

from __future__ import annotations

import logging
import os
from threading import Thread

import torch
from lmkit.api import Reply
from torch.profiler import supported_activities

log = logging.getLogger("lmkit.worker")


class Profiling:
    """Records the steps of one rank. Belongs to the thread that runs them; files are written in another one."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._profile: torch.profiler.profile | None = None  # while it records
        self._path, self._left = "", 0
        self._writing: Thread | None = None

    def set(self, path: str, num_steps: int) -> Reply:
        """Begins, or ends with 0."""
        if (self._profile is not None) == (num_steps > 0):
            return Reply(False, "steps are being recorded already" if num_steps else "no steps are being recorded")
        if num_steps == 0:
            self.end()
            return Reply(True)
        self._path, self._left = f"{path}-rank{self._rank}.json.gz", num_steps
        self._profile = torch.profiler.profile(activities=sorted(supported_activities(), key=str))
        self._profile.start()
        return Reply(True)

    def step(self) -> None:
        """A step begins."""
        if self._profile is not None:
            if self._left == 0:
                self.end()
            self._left -= 1

    def end(self) -> None:
        """Idempotent."""
        profile, self._profile = self._profile, None
        if profile is not None:
            self.close()
            profile.stop()
            self._writing = Thread(target=_write, args=(profile, self._path), name="lmkit-profile")
            self._writing.start()

    def close(self) -> None:
        """Waits for what is being written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.join()


def _write(profile: torch.profiler.profile, path: str) -> None:
    """The whole file, or none."""
    part = path.replace("-rank", ".part-rank")
    try:
        profile.export_chrome_trace(part)
        os.replace(part, path)
    except Exception as error:
        log.error("the recording of steps cannot be written to %s: %s", path, error)
