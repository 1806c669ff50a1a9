"""RayExecutor: ranks as actors of a Ray cluster, in one placement group."""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from threading import Event
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec
import ray
from lmkit.api import Checkpoint, ConfigError, EngineError, ResolvedPlan, make_target
from lmkit_multiproc.executor import RanksExecutor
from lmkit_multiproc.messages import Load, encode
from lmkit_worker.chosen import choice_of
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from lmkit_executor_ray.about import About, about, compare
from lmkit_executor_ray.cluster import connect, disconnect
from lmkit_executor_ray.hooks import Options
from lmkit_executor_ray.rank import RankActor, at_once

if TYPE_CHECKING:
    from lmkit.api import EngineConfig, Platform, Progress

HELLO_SECONDS = 5  # that whoever connects may take to prove that it is a rank


class RayRank:
    """One actor, from outside. `life`: resolves when it has ended."""

    def __init__(self, rank: int, actor: Any, where: About, connection: Connection, life: Any) -> None:
        self.rank, self.connection, self.life, self.pid = rank, connection, life, where.pid
        self._actor, self._address = actor, where.address

    def kill(self) -> None:
        with suppress(RayError, ValueError):  # it may be gone, or the cluster
            ray.kill(self._actor)

    def close(self) -> None:
        self.kill()
        self.connection.close()

    def status(self) -> str:
        """How it ended, in words."""
        try:
            ray.get(self.life, timeout=5)
        except GetTimeoutError:
            return f"its actor on {self._address} says nothing more"
        except RayError as e:
            return f"its actor on {self._address} died: {_first_line(e)}"
        return f"its actor on {self._address} ended"


class RayExecutor(RanksExecutor):
    """Each rank is an actor with as many CPUs as it has threads: one, unless told otherwise."""

    def __init__(
        self,
        config: EngineConfig,
        resolved: ResolvedPlan,
        checkpoint: Checkpoint,
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        self._threads = config.parallel.threads or 1
        config = replace(config, parallel=replace(config.parallel, threads=self._threads))
        super().__init__(config, resolved, checkpoint, progress)
        self._options = Options(**options)
        self._connected, self._over = False, Event()
        self._actors: list[Any] = []
        self._group: PlacementGroup | None = None

    def close(self) -> None:
        began = bool(self._processes)
        super().close()
        for actor in self._actors:
            with suppress(RayError, ValueError):
                ray.kill(actor)
        if self._group is not None:
            with suppress(RayError):
                remove_placement_group(self._group)
        if began:
            self._over.wait(5)  # whoever waits for ranks must not be there when the cluster goes
        self._actors, self._group = [], None
        if self._connected:
            self._connected = False
            disconnect()

    # -------------------------------------------------------------------------------------------------- details

    def _begin(self, until_loaded: ExitStack) -> tuple[str, ...]:
        self._connected = connect(self._options.address, self.size * self._threads)
        self._group = self._room()
        platform: Platform = make_target(choice_of(self._resolved, "platform"))
        actor = ray.remote(RankActor)
        for rank in range(self.size):
            place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
            made = actor.options(num_cpus=self._threads, scheduling_strategy=place, max_restarts=0)
            self._actors.append(made.remote(rank, platform.worker_env(self._config, rank)))
        node, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        load = encode(Load(self._config, self._resolved, self._checkpoint, ()))
        answers = self._get([actor.about.remote(load) for actor in self._actors])
        ranks = [msgspec.msgpack.decode(answer, type=About) for answer in answers]
        compare(about(node, address, self._resolved, self._checkpoint), ranks)
        places = self._get([self._meet(group, ranks) for group in groups(self._config)])
        self._processes: Sequence[RayRank] = self._call(address, ranks)
        return tuple(places)

    def _ended(self) -> RayRank:
        try:
            done, _ = ray.wait([process.life for process in self._processes], num_returns=1)
            return next(process for process in self._processes if process.life == done[0])
        finally:
            self._over.set()

    def _room(self) -> PlacementGroup:
        """CPUs for each rank. Raises ConfigError where the cluster has too few, or none are free in time."""
        need, has = self.size * self._threads, ray.cluster_resources().get("CPU", 0.0)
        wanted = f"{self.size} ranks with {self._threads} CPUs each"
        fix = "fewer ranks (--tp, --pp), fewer --threads, or more nodes"
        if has < need:
            raise ConfigError(f"{wanted} need {need} CPUs, and the Ray cluster has {has:g}", fix=fix)
        group = placement_group([{"CPU": self._threads}] * self.size, strategy=self._options.strategy)
        if not group.wait(self._options.seconds):
            remove_placement_group(group)
            free = ray.available_resources().get("CPU", 0.0)
            nodes = sum(node["Alive"] for node in ray.nodes())
            raise ConfigError(
                f"{wanted} found no room ({self._options.strategy}) in {self._options.seconds} s: "
                f"{free:g} of {has:g} CPUs are free, of {nodes} nodes",
                fix=f"{fix}; or another --executor.ray.strategy",
            )
        return group

    def _get(self, refs: list[Any]) -> list[Any]:
        """Raises EngineError for what an actor cannot do."""
        try:
            return ray.get(refs, timeout=self._options.seconds)
        except GetTimeoutError:
            raise EngineError(
                f"ranks did not start in {self._options.seconds} s", fix="a longer --executor.ray.seconds"
            ) from None
        except RayError as e:
            raise EngineError(
                f"a rank could not be started: {_first_line(e)}",
                fix="install lmkit with the same plugins, lmkit-executor-ray among them, on each node",
            ) from None

    def _meet(self, group: Sequence[int], ranks: Sequence[About]) -> Any:
        """Where these ranks meet: in memory if they are on one host, else at an address of the first."""
        first = self._actors[group[0]]
        if len({ranks[rank].node for rank in group}) == 1:
            return first.memory.remote()
        return first.port.remote(ranks[group[0]].address)

    def _call(self, address: str, ranks: Sequence[About]) -> list[RayRank]:
        """Lets each rank connect to this process."""
        secret, found = secrets.token_bytes(32), dict[int, Connection]()
        try:
            with socket.create_server((address, 0)) as server:
                port = server.getsockname()[1]
                lives = [
                    actor.follow.remote(address, port, secret, here)
                    for actor, here in zip(self._actors, ranks_here(ranks), strict=True)
                ]
                for connection in _callers(server, secret, self._options.seconds):
                    found[int(connection.recv_bytes(8))] = connection
                    if len(found) == self.size:
                        break
        finally:
            if len(found) < self.size:
                for connection in found.values():
                    connection.close()
        made = zip(self._actors, ranks, lives, strict=True)
        return [RayRank(i, actor, where, found[i], life) for i, (actor, where, life) in enumerate(made)]


def ranks_here(ranks: Sequence[About]) -> list[int]:
    """For each rank, how many are on its node."""
    nodes = Counter(rank.node for rank in ranks)
    return [nodes[rank.node] for rank in ranks]


def groups(config: EngineConfig) -> list[range]:
    """Ranks that meet, in the order that Worker has: the parts of each stage, then the stages of each part."""
    tp, pp = config.parallel.tp, config.parallel.pp
    stages = [range(stage * tp, (stage + 1) * tp) for stage in range(pp)] if tp > 1 else []
    parts = [range(part, tp * pp, tp) for part in range(tp)] if pp > 1 else []
    return stages + parts


def _callers(server: socket.socket, secret: bytes, seconds: int) -> Iterator[Connection]:
    """Whoever connects and knows the secret. Raises EngineError when nobody does in time."""
    until = monotonic() + seconds
    while True:
        server.settimeout(max(0.1, until - monotonic()))
        try:
            caller, _ = server.accept()
        except TimeoutError:
            raise EngineError(
                f"ranks did not connect to {server.getsockname()[0]} in {seconds} s",
                fix="let nodes of the cluster reach one another on any port",
            ) from None
        caller.setblocking(True)
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", HELLO_SECONDS, 0))
        connection = Connection(caller.detach())
        try:
            deliver_challenge(connection, secret)
            answer_challenge(connection, secret)
            with socket.socket(fileno=os.dup(connection.fileno())) as same:
                same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
            at_once(connection)
        except (AuthenticationError, EOFError, OSError):
            connection.close()
        else:
            yield connection


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines and lines[0].startswith("\x1b") else lines[0] if lines else type(error).__name__
