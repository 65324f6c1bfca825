"""The CUDA backend: Triton kernels; torch for memory, streams and graphs. Both are imported only when this is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unspool.errors import BackendError

if TYPE_CHECKING:
    from unspool.ops.cuda.backend import CudaOps as CudaOps

__all__ = ["CudaOps"]
OLDEST = (3, 6)  # of triton


def __getattr__(name: str) -> Any:
    if name != "CudaOps":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_software()
    from unspool.ops.cuda.backend import CudaOps

    return CudaOps


def require_card() -> None:
    """Raise a clear error if there is no usable GPU, or if a driver or package that it needs is missing."""
    require_software()
    from unspool.ops.cuda.backend import check_device

    check_device()


def require_software() -> None:
    """Report what is missing, and how to install it, before an import fails halfway."""
    for module in ("torch", "triton"):
        try:
            found = __import__(module).__version__
        except ImportError as error:
            raise BackendError(
                f"the CUDA backend needs {module}, which cannot be imported ({error}); "
                "run `pip install 'unspool[cuda]'`"
            ) from error
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        raise BackendError(
            f"the CUDA backend needs triton {'.'.join(map(str, OLDEST))} or later, and {found} is installed; run "
            "`pip install --upgrade 'unspool[cuda]'`, or use the CPU (--device cpu)"
        )
