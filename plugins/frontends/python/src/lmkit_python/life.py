"""What changes a running engine: pauses, sleep, an empty prefix cache, new weights. For an LLM, and beside an engine.

llm.pause("wait")
llm.update_weights("/dev/shm/step-200.safetensors")
llm.resume()
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from lmkit.api import ConfigError, EngineBusy, InvalidParam, Sleep, Wake
from lmkit.checkpoint import stamp_of
from lmkit.engine.messages import Act, ForgetPrefixes, LifeState, Pause, Resume, UpdateWeights

if TYPE_CHECKING:
    from lmkit.engine.client import EngineClient
    from lmkit.engine.loop import Engine
    from lmkit.engine.shared import SharedCore
    from torch import Tensor

Mode = Literal["abort", "wait", "keep"]
Weights = str | os.PathLike[str] | Mapping[str, "Tensor"]
LEVELS = (1, 2)
SHARED = Path("/dev/shm")  # where tensors are handed over, if there is such a place
POLL = 0.02  # seconds between looks at a pause that waits


class LifeCalls:
    """The calls of an LLM. Any thread may make them; those that generate meanwhile wait, and go on afterwards."""

    _engine: Engine
    shared: SharedCore

    @property
    def life(self) -> LifeState:
        """ "running", "finishing" or "pausing" (on the way to "paused"), "paused" or "asleep"."""
        return self._engine.core.life.state

    @property
    def is_paused(self) -> bool:
        return self._engine.core.life.holds

    @property
    def is_sleeping(self) -> bool:
        return self.life == "asleep"

    def pause(self, mode: Mode = "abort") -> None:
        """Returns when no step is made any more. What is being generated ends with finish "abort" and what it has;
        or ends first ("wait"); or goes on after `resume` ("keep"). Raises InvalidParam."""
        check_mode(mode)
        if mode == "abort":
            self.shared.abort_all()
        self._apply(Pause(finish=mode == "wait"))
        self.shared.run_until(lambda: self._engine.core.life.settled)
        check_paused(self.life)

    def resume(self) -> None:
        """Raises ConfigError for an engine that is asleep."""
        self._apply(Resume())

    def sleep(self, level: int = 1, mode: Mode = "abort") -> None:
        """Pauses, and gives up the KV cache, and the weights: to the host's memory (level 1; on a CPU they are there),
        or altogether (2), to be loaded again. Raises InvalidParam, or ConfigError where it cannot."""
        check_level(level)
        running = self.life == "running"
        self.pause(mode)
        try:
            self._apply(Sleep(level))
        except ConfigError:
            if running:
                self.resume()
            raise

    def wake_up(self) -> None:
        """Goes on, with the weights that were in force and an empty cache. Raises ConfigError; then it sleeps on."""
        self._apply(Wake())
        self.resume()

    def reset_prefix_cache(self) -> None:
        """What was computed for requests is not found by others any more."""
        self._apply(ForgetPrefixes())

    def update_weights(self, weights: Weights, *, partial: bool = False) -> None:
        """Other weights, from the next step on: of a safetensors file, of a folder with them, or tensors by name.

        The names, shapes and dtypes are the checkpoint's; with `partial` some are enough, where all that is merged into
        one linear comes together (q, k and v; all experts). What is being generated goes on from the tokens that it
        has, computed anew. Raises CheckpointError for what does not fit; then nothing has changed.
        """
        with handed_over(weights) as path:
            act = UpdateWeights(str(path), stamp_of(path), partial)
            running = self.life == "running"
            if running:
                self.pause("keep")
            try:
                self._apply(act)
            finally:
                if running and self.life == "paused":
                    self.resume()

    def _apply(self, act: Act) -> None:
        with self.shared.alone():
            self._engine.core.life.apply(act)


class EngineLife:
    """The same calls for an engine in a process of its own; requests that come while it is paused wait there."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._one = asyncio.Lock()  # of those that are several changes
        self.last: LifeState = "running"  # that was seen

    async def state(self) -> LifeState:
        """Raises EngineDead."""
        self.last = (await self._client.stats()).life
        return self.last

    async def pause(self, mode: Mode = "abort") -> None:
        """As `LLM.pause`."""
        check_mode(mode)
        async with self._one:
            await self._pause(mode)

    async def _pause(self, mode: Mode) -> None:
        if mode == "abort":
            self._client.abort_all()
        await self._client.change(Pause(finish=mode == "wait"))
        while await self.state() in ("finishing", "pausing"):
            await asyncio.sleep(POLL)
        check_paused(self.last)

    async def resume(self) -> None:
        """As `LLM.resume`; also of a pause that still waits."""
        await self._client.change(Resume())
        self.last = "running"

    async def sleep(self, level: int = 1, mode: Mode = "abort") -> None:
        """As `LLM.sleep`."""
        check_level(level)
        check_mode(mode)
        async with self._one:
            running = await self.state() == "running"
            await self._pause(mode)
            try:
                await self._client.change(Sleep(level))
                self.last = "asleep"
            except ConfigError:
                if running:
                    await self.resume()
                raise

    async def wake_up(self) -> None:
        """As `LLM.wake_up`."""
        async with self._one:
            await self._client.change(Wake())
            await self.resume()

    async def reset_prefix_cache(self) -> None:
        """As `LLM.reset_prefix_cache`."""
        await self._client.change(ForgetPrefixes())

    async def update_weights(self, weights: Weights, *, partial: bool = False) -> None:
        """As `LLM.update_weights`. An engine that is started again after it died reads the files again; where they are
        gone or changed, and for tensors that were handed over, it stays dead."""
        async with self._one:
            with handed_over(weights) as path:
                act = UpdateWeights(str(path), await asyncio.to_thread(stamp_of, path), partial)
                running = await self.state() == "running"
                if running:
                    await self._pause("keep")
                try:
                    await self._client.change(act)
                finally:
                    if running and self._client.state == "ready":
                        await self.resume()


@contextmanager
def handed_over(weights: Weights) -> Iterator[Path]:
    """The path of the weights; of tensors that of a file in shared memory, for as long as the context lasts.

    Raises CheckpointError for a path that cannot be read, ConfigError for tensors that have no room.
    """
    if not isinstance(weights, Mapping):
        yield Path(weights).absolute()
        return
    from safetensors.torch import save_file

    if not weights:
        raise ConfigError("no weights are given", fix="tensors by the names that the checkpoint has")
    tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in weights.items()}
    folder = SHARED if os.access(SHARED, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="lmkit-weights-", dir=folder) as inside:
        path = Path(inside) / "model.safetensors"
        try:
            save_file(tensors, path)
        except Exception as e:  # the library's own kind of OSError among them
            raise ConfigError(f"weights cannot be handed over in {folder or inside}: {e}", fix="give a file") from e
        del tensors
        yield path


def check_mode(mode: Any) -> None:
    if mode not in get_args(Mode):
        raise InvalidParam("mode", mode, "abort, wait or keep")


def check_level(level: Any) -> None:
    if level not in LEVELS or isinstance(level, bool):
        raise InvalidParam("level", level, "1 or 2")


def check_paused(state: LifeState) -> None:
    """After a pause: somebody may have resumed."""
    if state not in ("paused", "asleep"):
        raise EngineBusy("the engine was resumed before it was paused", fix="pause it again")
