"""The platform as the worker uses it. torch is imported in methods: the parent process asks without."""

import weakref

from lmkit.api import CapacityError, NullCollectives, NullEvent, NullGraphs, PluginError

from lmkit_platform_npu.hooks import MEMORY


class Memory:
    """The device's memory: what is taken is counted, and given back when its tensor is let go. Yours calls the
    driver's allocator."""

    def __init__(self, total):
        self.total, self.used = total, 0

    def take(self, shape, dtype):
        import torch

        tensor = torch.zeros(shape, dtype=dtype)
        if tensor.nbytes > self.total - self.used:
            raise CapacityError(
                f"{tensor.nbytes} bytes do not fit into the npu, {self.total - self.used} are free",
                fix="a smaller --max-rows",
            )
        self.used += tensor.nbytes
        weakref.finalize(tensor, self._give_back, tensor.nbytes)
        return tensor

    def _give_back(self, nbytes):
        self.used -= nbytes


class Buffer:
    """Contract: lmkit.api.Buffer. Memory of the host, and its twin on the device: two, as on real devices, so that
    what forgets `push` is noticed."""

    def __init__(self, memory, shape, dtype):
        import torch

        self.host = torch.zeros(shape, dtype=dtype)
        self.device = memory.take(shape, dtype)

    def push(self, n):
        """Copies the first n rows to the device, and gives them."""
        return self.device[:n].copy_(self.host[:n])


class Npu:
    """Contract: lmkit.api.Platform. One object per worker."""

    name = "npu"
    device_type = "cpu"

    def __init__(self):
        self.memory = Memory(MEMORY)

    def worker_env(self, config, rank):
        """Environment of the worker, set before torch is imported there: what drivers read once."""
        return {"LMKIT_NPU_RANK": str(rank)}

    def bind(self, rank, threads=None):
        import torch

        if threads is not None:
            torch.set_num_threads(threads)
        return torch.device(self.device_type)

    def free_memory(self):
        return self.memory.total - self.memory.used

    def measure(self, work):
        """Run `work` and give the bytes that it took at its most; None: not measured, and nothing was run."""
        return

    def defaults(self, model, device):
        """Configuration values that suit the device; what the user says wins."""
        return {"sched.max_tokens": 512, "cache.block_size": 32}

    def upload(self, source):
        """A tensor of the host, on the device."""
        return self.memory.take(source.shape, source.dtype).copy_(source)

    def buffer(self, shape, dtype):
        return Buffer(self.memory, shape, dtype)

    def event(self):
        """Tells when what was given to the device before `record` is done; here it always is."""
        return NullEvent()

    def graphs(self, limits):
        """Steps captured and replayed; NullGraphs runs each as it comes."""
        return NullGraphs()

    def collectives(self, rank, size, init_method=""):
        if size > 1:
            raise PluginError("npu runs on one device only", fix="--tp 1")
        return NullCollectives()
