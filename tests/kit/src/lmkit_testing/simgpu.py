"""A simulated accelerator, in Python alone: torch's device "sim", on which platforms of GPUs run unchanged.

Values are right, for they are computed at once on the CPU; time is as unkind as a real queue may be. A copy from pinned
memory is in flight until the host has waited for an event behind it, and its source must not change until then; a copy
to the host arrives only then, and before that it holds nonsense; an event has not passed before somebody waits for it.
Every wait of the host, copy from pageable memory, launch and allocation that the pool could not serve is counted, with
the line that made it. A graph records launches and replays them on the same memory; what ends a real capture is an
error. Fresh device memory holds nonsense. Each thread has a queue, and may have several (`Queue`); what two of them do
to the same memory without an event between is an error, and so is memory freed under the other one (`simqueues`).

Not simulated: the time that anything takes, arithmetic other than the CPU's.

It rests on torch's experimental Python backends (`_setup_privateuseone_for_python_backend`), for tests only.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from lmkit_testing.simqueues import Block, Clock, Order, SimError, Use, called, join, site, tree_leaves, uses
from lmkit_testing.triton_numbers import right_numbers

DEVICE = "sim"
CAPACITY = 1 << 30  # bytes of the device, where a test says nothing else
ROUND = 512  # bytes: sizes of blocks in the pool
NONSENSE = 0xA5  # byte of memory that nobody has written
# Operators of torch that are parts of others on the CPU, and one kernel on a GPU
FUSED = {
    "rms_norm", "linear", "scaled_dot_product_attention", "matmul", "layer_norm", "reshape", "flatten",
    "silu", "gelu", "embedding",
}  # fmt: skip
WAITS = {
    "_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "item", "unique_consecutive", "_unique2",
    "bincount", "equal",
}  # fmt: skip


def tree_map_only(kind: type, work: Callable[[Any], Any], tree: Any) -> Any:
    """The same tree, with `work` done to leaves of that kind."""
    if isinstance(tree, dict):
        return {key: tree_map_only(kind, work, value) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        parts = [tree_map_only(kind, work, part) for part in tree]
        return parts if isinstance(tree, list) else tuple(parts)
    return work(tree) if isinstance(tree, kind) else tree


class Queue:
    """As torch.cuda.Stream: within `with queue:` it is the calling thread's."""

    def __init__(self, device: Gpu | None = None) -> None:
        queues = (device or gpu).queues
        self.number, self.clock = len(queues), Clock()
        queues.append(self)
        self._outer: list[Queue] = []

    def __enter__(self) -> Queue:
        self._outer.append(gpu.queue)
        gpu.queue = self
        return self

    def __exit__(self, *_: object) -> None:
        gpu.queue = self._outer.pop()

    def wait_event(self, event: SimEvent) -> None:
        join(self.clock, event.clock)

    def wait_stream(self, other: Queue) -> None:
        join(self.clock, other.clock)

    def synchronize(self) -> None:
        gpu.waits["queue"] += 1
        gpu.complete(self.clock)


class Pool:
    """Memory of the device. What is freed is given out again for tensors of the same size in the queue that it was
    made for, as by torch's allocator.

    `live` bytes are lent, `peak` of them at most since it was set; more than `capacity` there are not.
    """

    def __init__(self) -> None:
        self.live, self.peak, self.capacity = 0, 0, CAPACITY
        self.free: dict[tuple[int, int], list[Block]] = {}  # by queue and size
        self.order = Order()
        self.misses: Counter[str] = Counter()  # where the pool had to grow

    def empty(self, like: Tensor) -> Tensor:
        """A tensor of the shape, strides and dtype of `like`, full of nonsense."""
        queue = gpu.queue
        for settled in self.order.settled(queue.number, queue.clock, gpu.host) if self.order.freed else ():
            self._release(settled)
        span = sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True)) + 1 if like.numel() else 0
        size = max(1, -(-span * like.itemsize // ROUND)) * ROUND
        if self.live + size > self.capacity:
            raise torch.OutOfMemoryError(f"{self.live} bytes of {self.capacity} are taken, {size} are wanted: {site()}")
        self.live += size
        self.peak = max(self.peak, self.live)
        held = self.free.setdefault((queue.number, size), [])
        if not held:
            self.misses[site()] += 1
        block = held.pop() if held else Block(queue.number, np.empty(size, np.uint8))
        self.order.lend(block)
        block.bytes[:] = NONSENSE
        lent = block.bytes[: max(span, 1) * like.itemsize]  # torch holds this object as long as the storage lives
        weakref.finalize(lent, self._take_back, block)
        flat = torch.from_numpy(lent).view(like.dtype)
        return flat.as_strided(like.shape, like.stride())

    def _take_back(self, block: Block) -> None:
        if block.queues - {block.owner}:
            self.order.freed.append(block)
        else:
            self._release(block)

    def _release(self, block: Block) -> None:
        self.free[block.owner, len(block.bytes)].append(block)
        self.live -= len(block.bytes)


class Gpu:
    """The one device. `seq` counts what was launched; what is in the clock `host` is known to be done."""

    def __init__(self) -> None:
        self.pool = Pool()
        self.launches: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()  # "kind at file:line"
        self.pageable: Counter[str] = Counter()
        self.strict = False  # waits and pageable copies are errors
        self.seq = 0
        self.host: Clock = {}
        self.queues: list[Queue] = []
        self._first = Queue(self)
        self.pinned: dict[int, Any] = {}  # by address
        self.leaving: list[tuple[Clock, Tensor, Tensor, str]] = []  # of its launch alone, source, as it was, where
        self.arriving: list[tuple[Clock, Tensor, Tensor]] = []  # of its launch alone, target, value
        self.graph: Graph | None = None
        self._current = threading.local()

    @property
    def queue(self) -> Queue:
        """That of the calling thread: the first one, where it has selected none."""
        return getattr(self._current, "queue", self._first)

    @queue.setter
    def queue(self, queue: Queue) -> None:
        self._current.queue = queue

    def clear(self) -> None:
        """Counts begin anew."""
        for counter in (self.launches, self.waits, self.pageable, self.pool.misses):
            counter.clear()

    def pin(self, host: Tensor) -> Tensor:
        self.pinned[host.untyped_storage().data_ptr()] = host
        return host

    def is_pinned(self, host: Tensor) -> bool:
        return host.untyped_storage().data_ptr() in self.pinned

    def wait(self, kind: str) -> None:
        """The host waits until the thread's queue is empty."""
        if self.graph is not None:
            raise SimError(f"{kind} while a graph is captured, at {site()}")
        self.waits[f"{kind} at {site()}"] += 1
        if self.strict:
            raise SimError(f"the host waits for the device: {kind} at {site()}")
        self.complete(self.queue.clock)

    def synchronize(self) -> None:
        """All queues become empty."""
        for queue in self.queues:
            self.complete(queue.clock)

    def done(self, clock: Clock) -> bool:
        return all(number <= self.host.get(queue, 0) for queue, number in clock.items())

    @torch.inference_mode()
    def complete(self, clock: Clock) -> None:
        """All that `clock` knows of has happened."""
        join(self.host, clock)
        left = [x for x in self.leaving if self.done(x[0])]
        self.leaving = [x for x in self.leaving if not self.done(x[0])]
        for _, source, was, where in left:
            if not torch.equal(source, was):
                raise SimError(f"a host buffer was written while its copy to the device was in flight, from {where}")
        arrived = [x for x in self.arriving if self.done(x[0])]
        self.arriving = [x for x in self.arriving if not self.done(x[0])]
        for _, target, value in arrived:
            target.copy_(value)

    def launch(self, name: str, work: Callable[[], Any], results: Any = (), used: Sequence[Use] = ()) -> None:
        """Counts what has been done, and has a graph remember how to do it again: `work` gives what `results` gets.

        `used`: the memory that it reads and writes.
        """
        self.seq += 1
        self.launches[name] += 1
        queue = self.queue
        join(queue.clock, self.host)
        queue.clock[queue.number] = self.seq
        if self.graph is not None:
            self.graph.record(work, tree_leaves(results), used)
            return
        for use in used:
            self.pool.order.use(use, queue.number, queue.clock, name)

    def last(self) -> Clock:
        """The clock of the last launch of the thread's queue alone."""
        return {self.queue.number: self.queue.clock[self.queue.number]}


gpu = Gpu()


class SimEvent:
    """A point in a queue, the thread's. It has passed when the host has waited for it, or for something behind it."""

    def __init__(self) -> None:
        self.clock: Clock = {}

    def record(self, queue: Queue | None = None) -> None:
        self.clock = dict((queue or gpu.queue).clock)

    def query(self) -> bool:
        return gpu.done(self.clock)

    def synchronize(self) -> None:
        if not self.query():
            gpu.waits["event"] += 1
        gpu.complete(self.clock)


class Graph:
    """Launches with the memory they were captured on, which nobody else gets as long as the graph lives."""

    def __init__(self) -> None:
        self.launches: list[tuple[Callable[[], Any], list[Tensor]]] = []
        self.used: dict[Use, None] = {}
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # memory that is written while it is captured, as it was

    def keep(self, tensors: Any) -> None:
        """They are about to be written, which a real capture does not do."""
        for tensor in (t for t in tree_leaves(tensors) if isinstance(t, Tensor)):
            whole = _bytes(tensor)
            if whole.data_ptr() not in self._before:
                self._before[whole.data_ptr()] = whole, whole.clone()

    def record(self, work: Callable[[], Any], results: list[Any], used: Sequence[Use]) -> None:
        self.used.update(dict.fromkeys(used))
        self.launches.append((work, [r for r in results if isinstance(r, Tensor)]))

    @contextmanager
    def capture(self) -> Iterator[None]:
        """A real capture runs nothing: what is made in it holds nonsense until the graph is replayed."""
        if gpu.graph is not None:
            raise SimError("a graph is captured within another")
        gpu.graph = self
        try:
            yield
        finally:
            gpu.graph = None
        for whole, before in self._before.values():
            whole.copy_(before)
        self._before.clear()
        for _, results in self.launches:
            for tensor in results:
                _nonsense(tensor)

    def replay(self) -> None:
        gpu.launch("graph", lambda: None, used=tuple(self.used))
        for work, results in self.launches:
            made = [r for r in tree_leaves(work()) if isinstance(r, Tensor)]
            for target, value in zip(results, made, strict=bool(results)):
                if target.data_ptr() != value.data_ptr():
                    target.copy_(value)


def _bytes(tensor: Tensor) -> Tensor:
    """All memory that it lies in."""
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0).view(torch.uint8)


def _nonsense(tensor: Tensor) -> None:
    _bytes(tensor).fill_(NONSENSE)


class SimTensor(Tensor):
    """A tensor of the device: `raw` on the CPU, which only kernels may touch."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> SimTensor:
        with torch.inference_mode(False):
            return Tensor._make_wrapper_subclass(
                cls, raw.shape, strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype,
                device=torch.device(DEVICE, 0), requires_grad=False,
            )  # fmt: skip

    def __init__(self, raw: Tensor) -> None:
        self.raw = raw

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"SimTensor({tuple(self.shape)}, {self.dtype})"

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def tolist(self) -> Any:
        gpu.wait("tolist")
        return self.raw.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert sim:0 device type tensor to numpy")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        if name not in FUSED and torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), "CompositeImplicitAutograd"
        ):
            decomposed = func.decompose(*args, **kwargs)
            if decomposed is not NotImplemented:
                return decomposed
        if name == "copy_":
            return _copy(func, args, kwargs)
        if name in ("_to_copy", "to"):
            return _convert(func, args, kwargs)
        masks = name in ("index", "index_put_", "index_put", "_index_put_impl_") and any(
            isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        counts = name == "repeat_interleave" and kwargs.get("output_size") is None  # how many?
        if name in WAITS or masks or counts:
            gpu.wait(name)
        for operand in tree_leaves((args, kwargs)):
            if isinstance(operand, Tensor) and not isinstance(operand, SimTensor) and operand.dim():
                raise SimError(f"{name}: tensors of the host and of the device in one call, at {site()}")
        return _run(func, args, kwargs)


def raw(tree: Any) -> Any:
    return tree_map_only(SimTensor, lambda t: t.raw, tree)


def _storages(tree: Any) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tree_leaves(tree) if isinstance(t, Tensor)}


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """One operator: a view costs nothing, all else is a launch. New tensors lie in the pool."""
    inner = {k: (torch.device("cpu") if isinstance(v, torch.device) else v) for k, v in raw(kwargs).items()}
    operands = raw(args)
    given = _storages((operands, inner))
    written: list[Any] = []
    if func._schema.is_mutable:
        names = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        places = {a.name: i for i, a in enumerate(func._schema.arguments)}
        written = tree_leaves([inner[n] if n in inner else operands[places[n]] for n in names])
        if gpu.graph is not None:
            gpu.graph.keep(written)
    result = called(func, operands, inner)
    viewing = func.is_view or func.overloadpacket.__name__ in ("_unsafe_view", "_reshape_alias", "lift_fresh")
    if viewing and _storages(result) <= given:  # `reshape` and the like copy where no view would do: a launch
        return tree_map_only(Tensor, SimTensor, result)
    fresh: list[Tensor] = []

    def own(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() in given:
            return t
        fresh.append(gpu.pool.empty(t).copy_(t))
        return fresh[-1]

    result = tree_map_only(Tensor, own, result)
    name = func.overloadpacket.__name__
    if name not in ("empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like"):

        def again() -> list[Tensor]:
            made = called(func, operands, inner)
            return [
                t for t in tree_leaves(made) if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in given
            ]

        taken = uses(tree_leaves((operands, inner)), [*fresh, *written])
        gpu.launch(name, again, fresh, taken)
    if func._schema.is_mutable:
        target = kwargs.get("out")
        return target if isinstance(target, SimTensor) else args[0]
    return tree_map_only(Tensor, SimTensor, result)


def _copy(func: Any, args: Any, kwargs: Any) -> Any:
    target, source = args[0], args[1]
    non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
    if isinstance(target, SimTensor) and isinstance(source, SimTensor):
        return _run(func, args, kwargs)
    if isinstance(target, SimTensor):
        _upload(target.raw, source, non_blocking)
        return target
    _download(target, source.raw, non_blocking)
    return target


def _upload(target: Tensor, source: Tensor, non_blocking: bool) -> None:
    pinned = gpu.is_pinned(source)
    if source.dim() and not pinned:  # a number travels with the launch
        gpu.pageable[site()] += 1
        if gpu.graph is not None:
            raise SimError(f"a copy from pageable memory while a graph is captured, at {site()}")
        if gpu.strict:
            raise SimError(f"a copy from pageable memory, at {site()}")
    if source.dim() and not (pinned and non_blocking):
        gpu.wait("copy to the device")
    target.copy_(source)
    gpu.launch("to device", lambda: target.copy_(source), used=uses([source] if pinned else [], [target]))
    if pinned and non_blocking:
        gpu.leaving.append((gpu.last(), source, source.clone(), site()))


def _download(target: Tensor, source: Tensor, non_blocking: bool) -> None:
    if not (non_blocking and gpu.is_pinned(target)):
        gpu.wait("copy to the host")
        target.copy_(source)
        gpu.launch("to host", lambda: target.copy_(source), used=uses([source], []))
        return
    gpu.launch("to host", lambda: target.copy_(source), used=uses([source], [target]))
    gpu.arriving.append((gpu.last(), target, source.clone()))
    target.view(torch.uint8).fill_(NONSENSE) if target.is_contiguous() and target.dim() else target.zero_()


def _convert(func: Any, args: Any, kwargs: Any) -> Any:
    """Another dtype, or a copy to the host, which is pinned where it need not be waited for, as torch makes it."""
    source, device = args[0], kwargs.get("device")
    device = device or next((a for a in args[1:] if isinstance(a, torch.device)), None)
    if device is not None and torch.device(device).type == "cpu":
        dtype = kwargs.get("dtype") or source.dtype
        values = source if dtype == source.dtype else source.to(dtype)
        target = torch.empty(source.shape, dtype=dtype)
        non_blocking = kwargs.get("non_blocking", False)
        _download(gpu.pin(target) if non_blocking else target, values.raw, non_blocking)
        return target
    kwargs.pop("device", None)
    kwargs.pop("non_blocking", None)
    args = tuple(a for a in args if not isinstance(a, torch.device))
    before = args[0].raw
    after = func(*raw(args), **raw(kwargs))
    if after is before:
        return args[0]
    return _run(func, args, kwargs)


def _empty(size: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
           memory_format: Any = None) -> SimTensor:  # fmt: skip
    return SimTensor(gpu.pool.empty(torch.empty(size, dtype=dtype, device="meta")))


def _empty_strided(size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None,
                   pin_memory: Any = None) -> SimTensor:  # fmt: skip
    return SimTensor(gpu.pool.empty(torch.empty_strided(size, stride, dtype=dtype, device="meta")))


def _arange(
    *numbers: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> SimTensor:
    values = torch.arange(*numbers, dtype=dtype)
    made = gpu.pool.empty(values).copy_(values)
    gpu.launch("arange", lambda: None, used=uses([], [made]))
    return SimTensor(made)


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    return _copy(torch.ops.aten.copy_.default, (target, source, non_blocking), {})


class SimRuntime:
    """The device as `lmkit_gpu.GpuPlatform` uses it."""

    device_type = DEVICE
    collectives = "gloo"  # what is sent lies on the host in truth

    def __init__(self) -> None:
        register()

    def select(self, index: int) -> torch.device:
        gpu.queue = Queue()
        return torch.device(DEVICE, index)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return gpu.pin(torch.zeros(shape, dtype=dtype))

    def event(self) -> SimEvent:
        return SimEvent()

    def capture(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        graph = Graph()
        with graph.capture():
            result = work()
        return graph.replay, result

    def memory(self) -> tuple[int, int]:
        return gpu.pool.capacity - gpu.pool.live, gpu.pool.capacity

    def peak(self, work: Callable[[], None]) -> int:
        """Exact."""
        gc.collect()
        gpu.pool.peak = before = gpu.pool.live
        work()
        most = gpu.pool.peak
        gc.collect()
        return most - before


_registered: list[Any] = []


def register() -> None:
    """The device becomes known to torch in this process, once."""
    if _registered:
        return
    _setup_privateuseone_for_python_backend(DEVICE)
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    for overload in ("arange", "arange.start", "arange.start_step"):  # torch's own resizes a tensor
        library.impl(overload, _arange, "PrivateUse1")
    _registered.append(library)


@contextmanager
def simulated() -> Iterator[Gpu]:
    """The device, empty. In it Triton's interpreter takes its tensors, and `Tensor.pin_memory` pins for it."""
    register()
    gpu.__init__()  # type: ignore[misc]
    pin_memory, record_stream = Tensor.pin_memory, Tensor.record_stream
    Tensor.pin_memory = lambda t, *args, **kwargs: gpu.pin(t.clone())  # type: ignore[method-assign]
    Tensor.record_stream = _record_stream  # type: ignore[assignment]
    try:
        with _interpreter(), right_numbers():
            yield gpu
    finally:
        Tensor.pin_memory, Tensor.record_stream = pin_memory, record_stream  # type: ignore[method-assign]
        gpu.graph, gpu.strict = None, False


def _record_stream(tensor: SimTensor, queue: Queue) -> None:
    gpu.pool.order.blocks[tensor.raw.untyped_storage().data_ptr()].shared.add(queue.number)


@contextmanager
def _interpreter() -> Iterator[None]:
    """Kernels of Triton run on `raw`, as one launch."""
    try:
        from triton.runtime.interpreter import GridExecutor
    except ImportError:
        yield
        return
    call = GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        if not any(isinstance(x, SimTensor) for x in tree_leaves((args, kwargs))):
            call(self, *args, **kwargs)
            return
        inner, named = raw(args), raw(kwargs)
        if gpu.graph is not None:
            gpu.graph.keep((inner, named))
        tensors = [t for t in tree_leaves((inner, named)) if isinstance(t, Tensor)]
        before = [t.clone() for t in tensors] if len(gpu.queues) > 2 else tensors
        call(self, *inner, **named)
        pairs = zip(tensors, before, strict=True)
        changed = [t for t, was in pairs if was is t or not torch.equal(_bytes(t.clone()), _bytes(was))]
        gpu.launch(f"triton {self.fn.__name__}", lambda: call(self, *inner, **named), used=uses(tensors, changed))

    GridExecutor.__call__ = launch
    try:
        yield
    finally:
        GridExecutor.__call__ = call
