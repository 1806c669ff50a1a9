"""The KV connector `nixl`: who asks is told where blocks lie, and reads them there (https://github.com/ai-dynamo/nixl)."""

from __future__ import annotations

import os
import socket
import uuid
from contextlib import suppress
from threading import Lock, local
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from lmkit.api import ConfigError
from lmkit_stores.peers import Peer, PeerConnector, PeerOptions
from lmkit_stores.wire import MOST_FRAME, MOST_KEYS, ask, receive_sized, send_sized

from lmkit_kv_connector_nixl.arena import Arena
from lmkit_kv_connector_nixl.hooks import Options

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lmkit.api import Checkpoint, KVConfig, KVKey, ResolvedPlan
    from lmkit_stores.asked import Answer

LANDING = 32 << 20  # bytes of each thread that reads; a larger frame gets as much as it needs
MOST_ANSWER = (1 << 20) + 32 * MOST_KEYS  # bytes
LOOK_SECONDS = 0.0001, 0.002  # between two looks whether blocks have come, at first and at most


class Places(msgspec.Struct, array_like=True):
    """An answer: what NIXL must know of the other engine to reach its memory, and where in it frames lie."""

    agent: bytes
    frames: list[tuple[int, int]]  # address and length of each; 0, 0: there is none


_places = msgspec.msgpack.Decoder(Places)


class StillComing(ConnectionError):
    """Blocks may still be written to where they were to go."""


class Agent:
    """This engine to NIXL. One thread at a time talks to it; none does while blocks are on their way."""

    def __init__(self, backend: str) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self._lock = Lock()
        self._agent = nixl_agent(f"lmkit-{uuid.uuid4()}", nixl_agent_config(backends=[backend]))
        if backend not in self._agent.backends:
            offered = ", ".join(self._agent.get_plugin_list())
            raise ConfigError(f"NIXL has no backend {backend}; it has {offered}", fix="--kv-connector.nixl.backend UCX")
        self._known: dict[bytes, str] = {}  # what engines say of themselves -> their names
        self._registered: list[np.ndarray] = []  # NIXL has their addresses

    def register(self, memory: np.ndarray) -> bytes:
        """Lets NIXL reach `memory` [N] uint8. What other engines must know of this one from now on."""
        with self._lock:
            self._agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
            self._registered.append(memory)
            return bytes(self._agent.get_agent_metadata())

    def read(self, other: bytes, here: Sequence[tuple[int, int]], there: Sequence[int], seconds: float) -> None:
        """Copies memory of the engine that said `other` of itself: to each address of `here`, so many bytes, from that
        of `there`. Raises ConnectionError where that fails, TimeoutError where it takes longer than `seconds`, and
        StillComing where it cannot be stopped."""
        try:
            with self._lock:
                handle = self._prepared(other, here, there)
                state = self._agent.transfer(handle)
            try:
                state = self._wait(handle, state, seconds)
            finally:
                self._release(handle)
        except OSError:
            self._forget(other)
            raise
        except Exception as e:  # NIXL's own, which have no class in common
            self._forget(other)
            raise ConnectionError(f"NIXL: {type(e).__name__}: {e}") from e
        if state != "DONE":
            self._forget(other)
            raise ConnectionError(f"NIXL says {state}")

    def _prepared(self, other: bytes, here: Sequence[tuple[int, int]], there: Sequence[int]) -> Any:
        if other not in self._known:
            self._known[other] = self._agent.add_remote_agent(other)
        to = [(address, size, 0) for address, size in here]
        source = [(address, size, 0) for address, (_, size) in zip(there, here, strict=True)]
        pair = (self._agent.get_xfer_descs(descs, "DRAM") for descs in (to, source))
        return self._agent.initialize_xfer("READ", *pair, self._known[other])

    def _release(self, handle: Any) -> None:
        try:
            with self._lock:
                self._agent.release_xfer_handle(handle)
        except Exception as e:
            raise StillComing(f"NIXL cannot stop it: {type(e).__name__}: {e}") from e

    def _forget(self, other: bytes) -> None:
        with self._lock, suppress(Exception):  # it may be gone already
            self._agent.remove_remote_agent(self._known.pop(other))

    def _wait(self, handle: Any, state: str, seconds: float) -> str:
        """NIXL wakes nobody, so it is looked, less and less often."""
        until, (pause, most) = monotonic() + seconds, LOOK_SECONDS
        while state == "PROC":
            if monotonic() > until:
                raise TimeoutError(f"blocks had not come after {seconds:g} s")
            sleep(pause)
            pause = min(2 * pause, most)
            with self._lock:
                state = self._agent.check_xfer_state(handle)
        return state


class Reader(Peer):
    """A peer that says where frames lie."""

    def __init__(self, address: str, greeting: bytes, options: PeerOptions, agent: Agent) -> None:
        super().__init__(address, greeting, options)
        self._agent, self._lands = agent, local()

    def frames(self, keys: list[KVKey]) -> Iterator[bytes | None]:
        peer = self.connection()
        ask(peer, "places", keys)
        try:
            said = _places.decode(receive_sized(peer, MOST_ANSWER))
        except msgspec.MsgspecError as e:
            raise ConnectionError(f"it said where blocks are and nobody can read it: {e}") from e
        if len(said.frames) != len(keys) or any(not 0 <= size <= MOST_FRAME for _, size in said.frames):
            raise ConnectionError("it said of other blocks where they are")
        rest = said.frames
        while rest:
            landing = self._landing(rest[0][1])
            num, end = 0, 0
            while num < len(rest) and end + rest[num][1] <= len(landing):
                end += rest[num][1]
                num += 1
            yield from self._read(said.agent, rest[:num], landing)
            rest = rest[num:]

    def _read(self, agent: bytes, places: list[tuple[int, int]], landing: np.ndarray) -> Iterator[bytes | None]:
        """The frames at these places, which `landing` has room for."""
        ends = np.cumsum([size for _, size in places]).tolist()
        starts = [end - size for end, (_, size) in zip(ends, places, strict=True)]
        wanted = [(start, *place) for start, place in zip(starts, places, strict=True) if place[1]]
        here = [(landing.ctypes.data + start, size) for start, _, size in wanted]
        if wanted:
            try:
                self._agent.read(agent, here, [address for _, address, _ in wanted], self.seconds)
            except StillComing:
                self._lands.memory = None
                raise
        for start, end in zip(starts, ends, strict=True):
            yield landing[start:end].tobytes() or None

    def _landing(self, least: int) -> np.ndarray:
        """Memory of this thread [N] uint8, N at least `least`, that NIXL can write to."""
        memory: np.ndarray | None = getattr(self._lands, "memory", None)
        if memory is None or len(memory) < least:
            memory = self._lands.memory = np.empty(max(least, LANDING), np.uint8)
            self._agent.register(memory)
        return memory


class Nixl(PeerConnector):
    """Blocks lie in memory that is registered with NIXL; whoever is told where reads them without this engine."""

    name = "nixl"
    magic = b"lmkit kv nixl 1\n"

    def __init__(self, checkpoint: Checkpoint, resolved: ResolvedPlan, kv: KVConfig, **options: Any) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # it speaks of each agent otherwise
        chosen = Options(**options)
        self._agent = Agent(chosen.backend)
        self._about = b""
        super().__init__(checkpoint, resolved, kv, chosen)

    def memory(self, size: int) -> Arena:
        self._arena = Arena(size)
        self._about = self._agent.register(self._arena.bytes)
        return self._arena

    def peer(self, address: str, greeting: bytes, options: PeerOptions) -> Reader:
        return Reader(address, greeting, options, self._agent)

    def answers(self) -> dict[str, Answer]:
        return {"places": self._tell}

    def _tell(self, peer: socket.socket, keys: list[KVKey]) -> None:
        places = Places(self._about, [self._arena.place(key) for key in keys])
        send_sized(peer, msgspec.msgpack.encode(places))
