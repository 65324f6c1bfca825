"""`CudaOps`: a model is recorded as a graph; lower.py lays the graph out when a number of rows first occurs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from unspool.config import EngineConfig
from unspool.errors import BackendError
from unspool.ops import Batch, KVCache
from unspool.ops.cuda import memory
from unspool.ops.cuda.device_experts import DeviceExperts, make_experts
from unspool.ops.cuda.kv import CudaKV
from unspool.ops.cuda.launch import is_interpreted
from unspool.ops.cuda.layout import norms_after_takes
from unspool.ops.cuda.matrix import DeviceMatrix, make_matrix, make_vector
from unspool.ops.cuda.runner import CudaStep
from unspool.ops.graph import RecordingOps, only_wanted_rows, record_step
from unspool.ops.storage import Storage, Widths

if TYPE_CHECKING:
    from unspool.weights.weight import Weight


class CudaOps(RecordingOps):
    name = "cuda"
    loads_late = False

    def __init__(self) -> None:
        self.device = torch.device("cpu" if is_interpreted() else "cuda")
        if is_interpreted():
            from unspool.ops.cuda import interpret

            interpret.prepare()
        else:
            check_device()
        self.kernel_set = kernel_set()

    # Preparing a model -----------------------------------------------------------------------------------------------
    def card(self) -> tuple[str, int, int]:
        """The card's name, and its free and total bytes of memory."""
        free, total = torch.cuda.mem_get_info()
        return torch.cuda.get_device_name(), free, total

    def experts(self, parts: Sequence[Sequence[Weight]]) -> DeviceExperts:
        with _explains_out_of_memory(parts[0][0].name):
            return make_experts(parts, self.device)

    def matrix(self, parts: Sequence[Weight]) -> DeviceMatrix:
        with _explains_out_of_memory(parts[0].name):
            return make_matrix(parts, self.device)

    def vector(self, parts: Sequence[Weight]) -> torch.Tensor:
        return make_vector(parts, self.device)

    def finish_loading(self, progress: Callable[[float], None] | None = None) -> None: ...

    def kv_room(self, widths: Widths, engine: EngineConfig) -> int | None:
        """Bytes that the GPU has left for keys and values, after the weights are loaded."""
        if is_interpreted():
            return None
        torch.cuda.empty_cache()  # frees the temporary buffers of loading
        free, total = torch.cuda.mem_get_info()
        return memory.kv_room(free, total, widths, engine)

    def kv_cache(
        self, layers: Sequence[Storage], engine: EngineConfig, num_blocks: int | Sequence[int], num_states: int = 0
    ) -> CudaKV:
        return CudaKV(layers, engine, num_blocks, num_states, self.device)

    def compile(self, forward: Callable[[Batch, KVCache], Any], kv: KVCache) -> CudaStep:
        """A step that returns logits when it is called, and tokens from its `launch`."""
        assert isinstance(kv, CudaKV)
        graph = norms_after_takes(only_wanted_rows(record_step(forward, kv)))
        return CudaStep(graph, kv, self.device)


@contextmanager
def _explains_out_of_memory(name: str) -> Iterator[None]:
    """Turn an out-of-memory error into one that names the weight that did not fit."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info()
        raise BackendError(
            f"the GPU's memory is full at {name}: {free / 2**30:.1f} of {total / 2**30:.1f} GiB are free; "
            "`unspool plan --device cuda` shows what a model needs"
        ) from error


def check_device() -> None:
    if not torch.cuda.is_available():
        raise BackendError(
            "torch sees no NVIDIA GPU: the driver is missing or too old (run nvidia-smi), or torch was installed "
            f"without CUDA (torch {torch.__version__}, CUDA {torch.version.cuda}; `pip install 'unspool[cuda]'` has it)"
        )
    major, minor = torch.cuda.get_device_capability()
    if major < 9:
        name = torch.cuda.get_device_name()
        raise BackendError(
            f"{name} has compute capability {major}.{minor}; the CUDA backend's kernels need 9.0 (Hopper) or later"
        )


def kernel_set() -> str:
    """What a receipt records: the kernels, the compiler and the chip determine the bits."""
    import triton

    if is_interpreted():
        return f"cuda-interpreted-triton{triton.__version__}"
    major, minor = torch.cuda.get_device_capability()
    return f"cuda-sm{major}{minor}-triton{triton.__version__}"
