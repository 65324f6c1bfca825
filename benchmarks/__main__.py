"""python -m benchmarks NAME: run a comparison; its last line is JSON."""

from __future__ import annotations

import sys
from importlib import import_module

NAMES = {
    "cpu": "decode, prefill, eight requests, start and memory beside other engines, on the CPU",
    "families": "decode, prefill, second turns and eight requests of many families beside llama.cpp",
    "formats": "one row times a matrix of each weight format, on the CPU",
    "compare": "decode, prefill, eight requests, start and memory of two checkouts, on the CPU",
    "serving": "the server under load beside llama.cpp's server",
    "replicas": "one process, one replica and two; routing by prefixes and by load",
    "sampling": "choosing a token beside llama.cpp and transformers",
    "attacks": "how long /health takes while the server is attacked",
    "bits": "token ids and logprob bits of two checkouts",
    "evaluation": "lm-eval's scores through our adapter, our server and transformers",
    "claims": "seven claims about greedy decoding and sampling",
    "extract": "facts extracted from sentences: freely, by a schema, by a tool",
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in NAMES:
        print("python -m benchmarks NAME [options]\n")
        print("\n".join(f"  {name:<10} {what}" for name, what in NAMES.items()))
        return 0 if argv in ([], ["-h"], ["--help"]) else 2
    status: int | None = import_module(f"benchmarks.{argv[0]}").main(argv[1:])
    return status or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
