"""What long measurements have in common: progress, tables, plots, runs that go on after Ctrl-C, and the last line."""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unspool.errors import BackendError, RequestError
from unspool.machine import free_memory, num_cores, processor_name
from unspool.quiet import Watch
from unspool.version import VERSION

if TYPE_CHECKING:
    import argparse

EXIT_INTERRUPT = 130
QUIET_CORES = 0.15


# The last line ------------------------------------------------------------------------------------------------------
def about(name: str, argv: Sequence[str], group: str = "bench") -> dict[str, Any]:
    """Where a result comes from. `group` and `argv` are the command line behind `unspool`, without the name."""
    words = ["eval"] if name == "lm-eval" else [group, name] if group else [name]
    return {
        "benchmark" if group == "bench" else "evaluation": name,
        "command": shlex.join(["unspool", *words, *argv]),
        "version": VERSION,
        "commit": _commit(),
        "python": platform.python_version(),
        "machine": {
            "processor": processor_name(),
            "cores": num_cores(),
            "free_memory": free_memory(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        },
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _commit() -> str | None:
    """Of the source tree that runs; None: it was installed."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


class Run:
    """One run of `unspool GROUP NAME`. `finish` prints the line of JSON and gives the exit status.

    `is_here`: this process does the work, so what other processes use disturbs it.
    """

    def __init__(
        self, name: str, argv: Sequence[str], *, plot: Path | None = None, group: str = "bench", is_here: bool = True
    ) -> None:
        self._about, self._plot = about(name, argv, group), plot
        self._start = time.perf_counter()
        self._watch: Watch | None = None
        if is_here:
            with suppress(OSError):  # the system does not report it
                self._watch = Watch()

    def record(self, result: Mapping[str, Any], *, interrupted: bool = False) -> dict[str, Any]:
        """The result with where it comes from."""
        others = None if self._watch is None else round(self._watch.others(), 2)
        run = {"took": round(time.perf_counter() - self._start, 3), "disturbed": others, "interrupted": interrupted}
        return self._about | run | dict(result)

    def finish(self, result: Mapping[str, Any], *, interrupted: bool = False, failed: bool = False) -> int:
        record = self.record(result, interrupted=interrupted)
        others = record["disturbed"]
        if others is not None and others > QUIET_CORES:
            print(f"other programs kept {others:.1f} cores busy meanwhile: times are longer than they need be")
        if self._plot is not None:
            print(f"plot: {self._plot}")
        print(json.dumps(record), flush=True)
        return EXIT_INTERRUPT if interrupted else 1 if failed else 0


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("--random", metavar="SHAPE[:FORMAT]", help="a shape of random weights instead of a model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int)


def add_output(parser: argparse.ArgumentParser, *, resumable: bool = False) -> None:
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw the result: .png, .svg or .pdf")
    if resumable:
        parser.add_argument(
            "--keep", metavar="FILE", type=Path,
            help="write what is done to this file; the same command goes on from it after Ctrl-C",
        )  # fmt: skip


# Progress -----------------------------------------------------------------------------------------------------------
class Progress:
    """A line on stderr, redrawn in place on a terminal; elsewhere one line for each tenth."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._start = what, total, time.monotonic()
        self._is_seen, self._reported, self._drawn = sys.stderr.isatty(), -1, 0.0

    def __call__(self, done: int, note: str = "") -> None:
        tenth = 10 * done // max(1, self._total)
        now = time.monotonic()
        if self._is_seen and (now - self._drawn > 0.1 or done == self._total):
            left = (now - self._start) * (self._total - done) / done if done else 0.0
            note += f", about {left:.0f} s left" if left >= 1 else ""
            text = f"{self._what}: {done:,} of {self._total:,}{note}"
            sys.stderr.write(f"\r\033[K{text[:110]}")
            self._drawn = now
        elif not self._is_seen and tenth != self._reported:
            sys.stderr.write(f"{self._what}: {done:,} of {self._total:,}{note}\n")
        self._reported = tenth
        sys.stderr.flush()

    def close(self) -> None:
        if self._is_seen:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


@contextmanager
def progress(what: str, total: int) -> Iterator[Progress]:
    shown = Progress(what, total)
    try:
        yield shown
    finally:
        shown.close()


# Tables -------------------------------------------------------------------------------------------------------------
def print_table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Columns as wide as they need be: texts to the left, numbers to the right."""
    texts = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(title), *(len(row[i]) for row in texts), 0) for i, title in enumerate(titles)]
    is_text = [all(isinstance(row[i], str) for row in rows) for i in range(len(titles))]
    for line in [list(titles), *texts]:
        cells = [part.ljust(w) if left else part.rjust(w) for part, w, left in zip(line, widths, is_text, strict=True)]
        print("  ".join(cells).rstrip())


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least this share of all is not above; None: there is none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


# Long runs ----------------------------------------------------------------------------------------------------------
class Journal:
    """What a long run has finished, kept in a file as lines of JSON, so that the same command can go on from it."""

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self._path = path
        self.items: list[dict[str, Any]] = []
        if path is None:
            return
        head = json.loads(json.dumps({"settings": dict(settings)}))
        if path.exists() and path.stat().st_size:
            self._read(path, head)
        else:
            path.write_text(json.dumps(head) + "\n", "utf-8")

    def _read(self, path: Path, head: dict[str, Any]) -> None:
        text = path.read_text("utf-8")
        whole = text[: text.rfind("\n") + 1]
        try:
            first, *others = [json.loads(line) for line in whole.splitlines()] or [None]
        except ValueError:
            raise RequestError(f"{path} is not the record of such a run; name another file", "keep") from None
        if first != head:
            raise RequestError(f"{path} is of a run with other settings ({first}); name another file", "keep")
        self.items = others
        if whole != text:  # the last line was being written when the run ended
            path.write_text(whole, "utf-8")

    def add(self, item: dict[str, Any]) -> None:
        self.items.append(item)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(item) + "\n")

    def note_interrupted(self) -> None:
        advice = "--keep FILE would have kept it"
        if self._path is not None:
            advice = f"the same command goes on from {self._path}"
        print(f"stopped with Ctrl-C; this is what was done so far ({advice})", file=sys.stderr)


# Plots --------------------------------------------------------------------------------------------------------------
def check_plot(path: Path | None) -> None:
    """Before a long run: whether its plot can be drawn and written."""
    if path is None:
        return
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise BackendError("plots are drawn by matplotlib: pip install 'unspool[plot]'") from None
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise RequestError(f"--plot is {path}; its name must end in .png, .svg or .pdf", "plot")
    if not path.absolute().parent.is_dir():
        raise RequestError(f"--plot is {path}; there is no such directory", "plot")


@contextmanager
def figure(path: Path, *, title: str, x: str, y: str, log: str = "") -> Iterator[Any]:
    """Axes to draw on; written to `path` at the end. `log` names the axes that are logarithmic: "x", "y" or "xy"."""
    with figures(path, [(title, x, y)], log=log) as [axes]:
        yield axes


@contextmanager
def figures(
    path: Path, panels: Sequence[tuple[str, str, str]], *, title: str = "", log: str = ""
) -> Iterator[Sequence[Any]]:
    """The same with several panels side by side: (title, x, y) of each."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    # Text stays text in an SVG: as curves it would be most of the file.
    style = {"svg.hashsalt": "unspool", "svg.fonttype": "none", "font.size": 9, "font.sans-serif": ["DejaVu Sans"]}
    with mpl.rc_context(style):
        drawn, grid = pyplot.subplots(
            1, len(panels), figsize=(6.4 if len(panels) == 1 else 4.6 * len(panels), 4.0), layout="constrained",
            squeeze=False,
        )  # fmt: skip
        for axes in grid[0]:
            if "x" in log:
                axes.set_xscale("log")
            if "y" in log:
                axes.set_yscale("log")
        yield grid[0]
        for axes, (name, x, y) in zip(grid[0], panels, strict=True):
            axes.set(title=name, xlabel=x, ylabel=y)
            axes.grid(visible=True, which="major", alpha=0.3)
            if axes.get_legend_handles_labels()[1]:
                axes.legend(fontsize=8)
        if title:
            drawn.suptitle(title)
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else {}
        drawn.savefig(path, metadata=metadata, dpi=120)
        pyplot.close(drawn)
