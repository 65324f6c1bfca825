"""llama.cpp's own server, for benchmarks: in an environment of its own, made once under the cache directory.

Run as a script by that environment's Python, it serves until it is ended: model, port, slots, context, threads, and
whether it keeps the prompts of its slots (`cache`, which is its default and not ours: no prompt comes twice here), and
whether slots share the context (`unified`), so that one request may have all of it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

PACKAGE = "xllamacpp"  # prebuilt wheels of llama.cpp with its server


def command(
    python: Path, model: Path, port: int, slots: int, context: int, threads: int, **more: object
) -> list[str]:
    options = {"model": str(model), "port": port, "slots": slots, "context": context, "threads": threads, **more}
    return [str(python), str(Path(__file__).resolve()), json.dumps(options)]


def _serve(options: dict[str, object]) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = options["model"]
    params.hostnames, params.port = ["127.0.0.1"], options["port"]
    params.n_parallel, params.n_ctx = options["slots"], options["context"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options["threads"]
    params.cont_batching, params.cache_prompt, params.warmup = True, bool(options.get("cache")), True
    params.kv_unified = bool(options.get("unified"))
    params.n_gpu_layers, params.verbosity = 0, -1
    server = xllamacpp.Server(params)
    print(json.dumps({"address": server.listening_address, "build": str(xllamacpp.BUILD_INFO)}), flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
