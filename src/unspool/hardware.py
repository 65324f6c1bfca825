"""Hardware that plans can be made for without having it: memory, bandwidth and compute, each with its source.

Figures are the manufacturers' own: dense matrix products in bf16 or fp16 with float32 sums, without sparsity. Real
programs reach 70 to 95% of a bandwidth and less of a compute figure, so what a plan gives is a floor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from unspool.errors import RequestError
from unspool.suggest import nearest

GB, TB, TFLOPS = 1e9, 1e12, 1e12


@dataclass(frozen=True)
class Hardware:
    name: str  # as it is asked for
    title: str
    kind: Literal["gpu", "apple", "cpu"]
    memory: float  # bytes; of a computer, what the largest usual one has
    bandwidth: float  # bytes a second
    compute: float  # floating-point operations a second
    source: str

    @property
    def balance(self) -> float:
        """Operations that can be computed while one byte is read."""
        return self.compute / self.bandwidth


def _gpu(name: str, title: str, memory: float, bandwidth: float, compute: float, source: str) -> Hardware:
    return Hardware(name, title, "gpu", memory * GB, bandwidth * GB, compute * TFLOPS, source)


def _apple(name: str, memory: float, bandwidth: float, cores: int, clock: float) -> Hardware:
    """Apple publishes the bandwidth and the number of GPU cores, not the clock (GHz): compute is an estimate."""
    title = "Apple " + name.replace("-", " ").title()
    source = (
        f"Apple, technical specifications ({bandwidth:g} GB/s, {cores}-core GPU); compute estimated: {cores} cores × "
        f"128 lanes × 2 × {clock:g} GHz"
    )
    compute = cores * 128 * 2 * clock * 1e9
    return Hardware(name, title, "apple", memory * GB, bandwidth * GB, compute, source)


def _desktop(
    name: str, title: str, memory: float, transfers: float, cores: int, clock: float, width: int, source: str
) -> Hardware:
    """Two channels of 8 bytes; float32 multiply-adds of all cores at the base clock, `width` operations a cycle."""
    about = f"{source}; 2 channels × 8 bytes × {transfers:g} MT/s; {cores} cores × {clock:g} GHz × {width}"
    return Hardware(name, title, "cpu", memory * GB, 16 * transfers * 1e6, cores * clock * 1e9 * width, about)


HARDWARE: dict[str, Hardware] = {
    each.name: each
    for each in (
        _gpu("h100", "NVIDIA H100 SXM", 80, 3350, 989.4, "NVIDIA H100 datasheet; half of the figure with sparsity"),
        _gpu("h200", "NVIDIA H200 SXM", 141, 4800, 989.4, "NVIDIA H200 datasheet; half of the figure with sparsity"),
        _gpu("a100", "NVIDIA A100 SXM 80 GB", 80, 2039, 312, "NVIDIA A100 datasheet, SXM4 80 GB"),
        _gpu("a100-40gb", "NVIDIA A100 SXM 40 GB", 40, 1555, 312, "NVIDIA A100 datasheet, SXM4 40 GB"),
        _gpu("a10", "NVIDIA A10", 24, 600, 125, "NVIDIA A10 datasheet"),
        _gpu("l4", "NVIDIA L4", 24, 300, 121, "NVIDIA L4 datasheet; half of the figure with sparsity"),
        _gpu("rtx-4090", "NVIDIA RTX 4090", 24, 1008, 165.2, "NVIDIA Ada architecture whitepaper, float32 sums"),
        _apple("m1", 16, 68.25, 8, 1.28),
        _apple("m2", 24, 100, 10, 1.4),
        _apple("m3", 24, 100, 10, 1.4),
        _apple("m4", 32, 120, 10, 1.47),
        _apple("m4-pro", 64, 273, 20, 1.58),
        _apple("m1-max", 64, 400, 32, 1.3),
        _apple("m2-max", 96, 400, 38, 1.4),
        _apple("m3-max", 128, 400, 40, 1.4),
        _apple("m4-max", 128, 546, 40, 1.58),
        _apple("m2-ultra", 192, 800, 76, 1.4),
        _apple("m3-ultra", 512, 819, 80, 1.4),
        _desktop("ddr4", "desktop with DDR4-3200 (Ryzen 9 5950X)", 64, 3200, 16, 3.4, 32, "AMD specifications"),
        _desktop("ddr5", "desktop with DDR5-5600 (Ryzen 9 9950X)", 96, 5600, 16, 4.3, 64, "AMD specifications"),
    )
}  # fmt: skip
ALIASES = {
    "h100-sxm": "h100", "h200-sxm": "h200", "a100-80gb": "a100", "a100-sxm": "a100", "4090": "rtx-4090",
    "rtx4090": "rtx-4090", "ddr4-3200": "ddr4", "ddr5-5600": "ddr5",
}  # fmt: skip


def find_hardware(name: str) -> Hardware:
    """The hardware of this name, whatever its case: "H100 SXM", "h100-sxm", "RTX 4090"."""
    key = "-".join(name.lower().replace("_", " ").split())
    for prefix in ("nvidia-", "apple-", "geforce-"):
        key = key.removeprefix(prefix)
    key = ALIASES.get(key, key)
    if key not in HARDWARE:
        hint = nearest(key, HARDWARE, f"known: {', '.join(HARDWARE)}")
        raise RequestError(f"{name!r} is not known hardware{hint}", "on")
    return HARDWARE[key]
