"""Frame of the kernel benchmarks: what a case is, and how its time and peak memory are measured.

Times: every backend of a group runs in one process, in turn, and the medians are compared, so that whatever else the
machine does hits all of them alike. Memory: one backend per process, because a heap that another one has used hides
the peak, read as the rise of the kernel's high-water mark (Linux only).
"""

import ctypes
import dataclasses
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

Run = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Group:
    """One operation at one shape, computed by several backends.

    Attributes:
        op, shape: labels; together they identify the group.
        backends: name -> builder. A builder makes its own (seeded) inputs and returns the function to be measured.
            The first backend is the peer to which the others are compared.
        limit: name of a backend that is no implementation but a bound (such as touching the memory once), or None.
        memory: whether peak memory is worth measuring here.
    """

    op: str
    shape: str
    backends: dict[str, Callable[[], Run]]
    limit: str | None = None
    memory: bool = True


@dataclasses.dataclass
class Row:
    """Measured values of one backend: seconds (median), CPU seconds per wall second, peak extra bytes or None."""

    group: Group
    backend: str
    seconds: float
    cpu_share: float
    peak: int | None = None


def measure_times(group: Group, rounds: int, budget: float, clock: str) -> list[Row]:
    """Medians over interleaved rounds; a backend stops early (after 3 rounds at least) once it used up its budget.

    Args:
        clock: "wall", or "cpu" for the process's CPU time: with one thread it stays comparable on a busy machine.
    """
    runs = {name: build() for name, build in group.backends.items()}
    for run in runs.values():
        run()
    wall: dict[str, list[float]] = {name: [] for name in runs}
    cpu: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(rounds):
        for name, run in runs.items():
            if index >= 3 and sum(wall[name]) > budget:
                continue
            cpu_start, start = time.process_time(), time.perf_counter()
            run()
            wall[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - cpu_start)
    chosen = cpu if clock == "cpu" else wall
    return [Row(group, name, statistics.median(chosen[name]), sum(cpu[name]) / sum(wall[name])) for name in runs]


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def measure_peak_here(run: Run) -> int:
    """Bytes by which one call of `run` raises the resident high-water mark of this process, results included."""
    run()  # libraries, thread pools and caches are set up by the first call
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    result = run()
    peak = _status("VmHWM") - before
    del result
    return peak


def measure_peak(group: Group, backend: str, threads: int) -> int | None:
    """`measure_peak_here` in a fresh process; None where the system has no high-water mark to reset."""
    if not Path("/proc/self/clear_refs").exists():
        return None
    # A fixed threshold makes malloc give every large block back at once, instead of keeping a growing heap.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, sys.argv[0], "--peak", group.op, group.shape, backend, "--threads", str(threads)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"measuring the memory of {group.op} {group.shape} {backend} failed:\n{done.stderr}")
    return int(done.stdout.split()[-1])


def table(rows: list[Row]) -> str:
    """Markdown table of rows; ratios are to the first backend of each group, and to its limit where it has one."""
    header = ["op", "shape", "backend", "ms", "faster", "of limit", "peak MiB", "less memory"]
    lines = [header, ["---"] * len(header)]
    for row in rows:
        others = {r.backend: r for r in rows if r.group is row.group}
        peer = next(iter(others.values()))
        limit = others[row.group.limit].seconds if row.group.limit else None
        lines.append(
            [
                row.group.op,
                row.group.shape,
                row.backend,
                f"{row.seconds * 1e3:.2f}",
                f"{peer.seconds / row.seconds:.1f}x",
                "" if limit is None else f"{limit / row.seconds:.0%}",
                "" if row.peak is None else f"{row.peak / 2**20:.1f}",
                "" if row.peak is None or peer.peak is None else f"{peer.peak / max(row.peak, 1):.1f}x",
            ]
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def warn_if_starved(rows: list[Row], threads: int) -> None:
    """Says so when the threads did not get their cores: such a run's times mean nothing."""
    for row in rows:
        if row.cpu_share < 0.75 * threads and row.seconds > 0.01:
            print(f"note: {row.group.op} {row.backend}: {row.cpu_share:.2f} CPU seconds per second", file=sys.stderr)


def set_threads(threads: int) -> None:
    """Sets torch's intra-op threads."""
    torch.set_num_threads(threads)
