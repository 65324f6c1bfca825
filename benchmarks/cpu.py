"""Decoding, prefill, eight at once, start and memory on the CPU, beside llama.cpp and others in one interleaved run.

    python -m benchmarks cpu --peer llama.cpp --peer ctranslate2
    python -m benchmarks cpu --peer llama.cpp --peer-python llama.cpp=/path/bin/python --only decode-32 --rounds 3

Every engine lives in a process and an environment of its own, which is made once under the cache directory (for
llama.cpp that compiles it: 20 minutes on two cores). All stay loaded and warm, one works at a time, and each round
visits all of them, each first in its turn, for machines drift: only the ratios of one round count, and their median is
shown. Above 1 is ours. A rate leaves the prompt out of decoding and is the prompt's tokens over the time to the first
token in prefill; start and memory are those of a fresh process (start: until the first token of 37, right after another
one, so that its files are in memory; memory: its peak over a decoding run). A measurement during which other processes
kept more than 0.15 cores busy is made again, twice at most; how many were disturbed even so is shown, and a run with
many of them proves nothing. Our decoding's share of the memory's bandwidth is found in turns of a tenth of a second:
three passes of mere reading, 32 tokens, three passes again. A share is of the fastest pass beside it, and the median
turn counts, for a host may move a guest's cores, and with them the bandwidth, from one second to the next. The share
of the fastest read in the whole run is shown as well. `--isa avx2` keeps all engines to AVX2, even where the processor
has more: llama.cpp is compiled for it, and the others are made to believe it (narrow.py; it takes objdump and a
compiler). Those of `--peer-python` are left as they are, and any other `--isa` is for our kernels alone.
OpenVINO rounds the minima of a file's blocks when it reads them (docs/notes/cpu.md); `openvino-exact` is its graph with
the file's own minima, so that it runs the same weights. `python -m benchmarks compare` measures two checkouts of
unspool in the same way. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from benchmarks import rounds
from benchmarks.narrow import has_more_than_avx2, libraries, narrow
from benchmarks.peer import Process, environment
from benchmarks.rounds import Engine, Record, Rounds, Row, room, rows, start_prompt
from unspool.errors import BackendError
from unspool.machine import MemoryReader, measure_bandwidth, num_cores
from unspool.quiet import Watch

if TYPE_CHECKING:
    from unspool.models.checkpoint import Checkpoint

OURS = "unspool"
TURNS = 16  # of reading and decoding, a round


@dataclass(frozen=True)
class Peer:
    driver: str
    packages: tuple[str, ...]
    note: str = ""
    converter: str = ""  # a script that, run with a source and a target, writes the peer's own format
    # For engines that are built for one processor: how they are for AVX2. Others ask what they run on.
    built_avx2: dict[str, str] = field(default_factory=dict)


PEERS = {
    "llama.cpp": Peer(
        "llama_cpp",
        ("llama-cpp-python", "numpy"),
        "compiles llama.cpp: about 20 minutes on two cores",
        built_avx2={"CMAKE_ARGS": "-DGGML_NATIVE=OFF"},  # for AVX2 and what comes with it, then
    ),
    "ctranslate2": Peer("ctranslate2", ("ctranslate2", "numpy"), converter="via_ctranslate2"),
    "openvino": Peer("openvino", ("openvino-genai", "numpy")),
    "openvino-exact": Peer("openvino", ("openvino-genai", "numpy"), converter="exact_openvino"),
    "onnxruntime": Peer(
        "onnxruntime",
        ("onnxruntime-genai", "onnx-ir", "torch", "transformers", "numpy"),
        "with torch",
        converter="via_onnxruntime",
    ),
}


# Engines ------------------------------------------------------------------------------------------------------------
def engines(checkpoint: Checkpoint, options: argparse.Namespace, root: Path) -> list[Engine]:
    text, ids = start_prompt(checkpoint)
    setup = {"model": str(checkpoint.path), "threads": options.threads, "isa": options.isa, "text": text, "ids": ids}
    found = [Engine(OURS, Path(sys.executable), "unspool", setup)]
    pythons = dict(part.split("=", 1) for part in options.peer_python)
    is_narrow = options.isa == "avx2" and has_more_than_avx2()
    for name in dict.fromkeys(options.peer):
        peer, given = PEERS[name], pythons.get(name)
        python = Path(given) if given else peer_python(peer, root, is_narrow)
        model = converted(name, peer, python, checkpoint, root) if peer.converter else checkpoint.path
        engine = Engine(name, python, peer.driver, {**setup, "model": str(model)})
        found.append(kept_to_avx2(engine, root) if is_narrow and not given and not peer.built_avx2 else engine)
    return found


def peer_python(peer: Peer, root: Path, is_narrow: bool) -> Path:
    name = peer.packages[0]
    if is_narrow and peer.built_avx2:
        return environment(root, f"{name}-avx2", peer.packages, peer.note, peer.built_avx2)
    return environment(root, name, peer.packages, peer.note)


def kept_to_avx2(engine: Engine, root: Path) -> Engine:
    """The engine in a copy of its environment, made once, that believes to be on a processor without AVX-512."""
    home = engine.python.parents[1]
    target = root / "bench" / f"{home.name}-avx2"
    done = target / "narrowed"
    if not done.exists():
        print(f"making {target} (once; its libraries are searched for cpuid)", file=sys.stderr)
        with engine.started(room([rows(1)["start"]])) as (process, _, _):
            asking = libraries(process.pid, home)
        shutil.rmtree(target, ignore_errors=True)
        done.write_text(str(narrow(home, asking, target)))
    return replace(engine, python=target / "bin" / "python", environ={"LD_PRELOAD": done.read_text()})


def converted(name: str, peer: Peer, python: Path, checkpoint: Checkpoint, root: Path) -> Path:
    """The model in the peer's own format, made once."""
    from benchmarks.export import export

    target = root / "bench" / "models" / f"{checkpoint.name}-{checkpoint.fingerprint[:12]}-{name}"
    if not (target / "complete").exists():
        print(f"making {target} (once)", file=sys.stderr)
        with TemporaryDirectory() as folder:
            export(checkpoint, Path(folder))
            command = [str(python), str(rounds.DRIVERS / f"{peer.converter}.py"), folder, str(target)]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if done.returncode:
                raise BackendError(f"{command!r} ended with status {done.returncode}\n{done.stdout[-2000:].strip()}")
        (target / "complete").touch()
    return target


# Measuring ----------------------------------------------------------------------------------------------------------
@dataclass
class CpuRecord(Record):
    """And how fast memory was read meanwhile."""

    bandwidths: list[float] = field(default_factory=list)  # bytes a second, at each round's beginning
    turns: list[tuple[float, float]] = field(default_factory=list)  # our decoding's tokens/s, bytes/s read beside it
    disturbed_turns: int = 0  # which do not count

    def median_ratios(self, known: dict[str, Row]) -> dict[str, dict[str, float]]:
        """The median of the rounds' ratios, by row and peer."""
        return {
            row: {name: statistics.median(self.ratios(known[row], OURS, name)) for name in of if name != OURS}
            for row, of in self.values.items()
        }

    @property
    def ceiling(self) -> float:
        """Bytes a second. The best round's: whatever else runs can only make reading slower, never the memory."""
        return max(self.bandwidths + [read for _, read in self.turns])

    def share_of_ceiling(self, bytes_per_token: int) -> float | None:
        rates = self.values.get("decode-32", {}).get(OURS, [])
        return bytes_per_token * statistics.median(rates) / self.ceiling if rates else None

    def shares(self, bytes_per_token: int) -> list[float]:
        """What our decoding used of the bandwidth beside it: the quartiles of all turns."""
        found = [bytes_per_token * rate / read for rate, read in self.turns]
        return statistics.quantiles(found, n=4, method="inclusive") if len(found) > 1 else found * 3


class Bench(Rounds):
    """Rounds that read memory, too: at their beginning, and in turns with our decoding."""

    record: CpuRecord

    def __init__(self, found: list[Engine], known: dict[str, Row], vocab_size: int, threads: int) -> None:
        super().__init__(found, known, vocab_size)
        self.record, self.threads = CpuRecord(), threads

    def round(self, number: int, alive: dict[str, Process]) -> None:
        time.sleep(rounds.SETTLE_SECONDS)
        self.record.bandwidths.append(measure_bandwidth(self.threads, seconds=1.0).bytes_per_second)
        super().round(number, alive)
        if "decode-32" in self.rows:
            self._take_turns(alive[OURS], replace(self.rows["decode-32"], steps=32))

    def _take_turns(self, ours: Process, row: Row) -> None:
        """Reading and decoding in turns; one that others disturbed is not counted."""
        time.sleep(rounds.SETTLE_SECONDS)
        with closing(MemoryReader(self.threads)) as reader:
            for _ in range(TURNS):
                watch, before = Watch(ours.pid), reader.best()
                rate = row.rate(self.ask(ours, row, self.prompts(row), row.steps))
                read = max(before, reader.best())
                if watch.others(ours.pid) <= rounds.QUIET_CORES:
                    self.record.turns.append((rate, read))
                else:
                    self.record.disturbed_turns += 1

def bytes_per_token(checkpoint: Checkpoint) -> int:
    """What one step of one request reads of the weights: all but an embedding table that is not the head too."""
    total = sum(weight.nbytes for weight in checkpoint.weights.values())
    table = 0 if checkpoint.config.tied_embeddings else checkpoint.weights["token_embd.weight"].nbytes
    return total - table


# Reporting ----------------------------------------------------------------------------------------------------------
def table(record: CpuRecord, known: dict[str, Row]) -> Iterator[str]:
    medians, ratios = record.medians(), record.median_ratios(known)
    names = list(record.versions)
    width = max(11, *map(len, names)) + 1
    yield f"{'':<26}{'':>9}" + "".join(f"{name:>{width}}" + 9 * " " * (name != OURS) for name in names).rstrip()
    for row, values in medians.items():
        digits = 2 if known[row].unit == "s" else 1
        cells = [
            f"{values[name]:>{width}.{digits}f}" + (f" ({ratios[row][name]:5.2f}×)" if name != OURS else "")
            for name in names
        ]
        yield f"{known[row].title:<26}{known[row].unit:>9}" + "".join(cells)


def report(record: CpuRecord, known: dict[str, Row], size: int) -> dict[str, Any]:
    low, share, high = record.shares(size) or (None, None, None)
    return {
        "versions": record.versions,
        "bytes_per_token": size,
        "read_gb_per_second": record.ceiling / 1e9,
        "read_gb_per_second_rounds": [value / 1e9 for value in record.bandwidths],
        "disturbed": record.disturbed,
        "decode_share_of_bandwidth": share,
        "decode_share_of_bandwidth_quartiles": [low, high],
        "decode_share_of_fastest_read": record.share_of_ceiling(size),
        "disturbed_turns": record.disturbed_turns,
        "turns": [{"tokens_per_second": rate, "read_gb_per_second": read / 1e9} for rate, read in record.turns],
        "median": record.medians(),
        "ratio": record.median_ratios(known),
        "rounds": record.values,
        "others_cores": record.others,
    }


def print_table(record: CpuRecord, known: dict[str, Row], size: int) -> None:
    longest = max(map(len, record.versions))
    for name, version in record.versions.items():
        print(f"{name:<{longest}} {version}")
    print("\n".join(table(record, known)))
    limit, share = record.ceiling, record.share_of_ceiling(size)
    line = f"a token reads {size / 1e6:.1f} MB of weights; the fastest read of memory was {limit / 1e9:.1f} GB/s"
    print(line + (f", of which our decoding reached {100 * share:.0f}%" if share is not None else ""))
    if record.turns:
        low, middle, high = (f"{100 * share:.0f}%" for share in record.shares(size))
        left_out = f", {record.disturbed_turns} disturbed ones left out" if record.disturbed_turns else ""
        summary = f"{middle} (half of them {low} to {high}{left_out})"
        print(f"of what was read beside it, in {len(record.turns)} turns: {summary}")
    disturbed, count = record.disturbed
    print(f"{disturbed} of {count} measurements were disturbed by other processes")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks cpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = num_cores()
    known = rows(64)
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument(
        "--peer", choices=PEERS, action="append", default=[], help="an engine to run beside (repeatable)"
    )
    parser.add_argument(
        "--peer-python", action="append", default=[], metavar="PEER=PYTHON", help="a Python that has it"
    )
    parser.add_argument("--rounds", type=int, default=5, help="(5)")
    parser.add_argument("--steps", type=int, default=64, help="tokens that a decoding row decodes (64)")
    parser.add_argument("--threads", type=int, default=cores, help=f"threads of each engine ({cores})")
    parser.add_argument("--isa", choices=("auto", "avx512", "avx2", "plain"), default="auto", help="(auto)")
    parser.add_argument("--only", choices=known, action="append", help="measure this row (repeatable)")
    options = parser.parse_args(argv)
    from unspool.models.checkpoint import open_checkpoint
    from unspool.weights.store import cache_dir, resolve

    checkpoint = open_checkpoint(resolve(options.model))
    known = {name: row for name, row in rows(options.steps).items() if not options.only or name in options.only}
    found = engines(checkpoint, options, cache_dir())
    load = os.getloadavg()[0]
    bench = Bench(found, known, checkpoint.config.vocab_size, options.threads)
    bench.run(options.rounds)
    record, size = bench.record, bytes_per_token(checkpoint)
    print_table(record, known, size)
    about = {"model": checkpoint.name, "threads": options.threads, "isa": options.isa, "load_before": load}
    print(json.dumps({"benchmark": "cpu", **about, **report(record, known, size)}))
    return 0
