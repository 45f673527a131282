"""Benchmarks of the kernels: one table of operation x shape x backend, with ratios to peers measured in the same run.

    python kernels/bench.py                    # everything
    python kernels/bench.py --op kda           # operations whose name contains "kda"
    python kernels/bench.py --no-memory        # times only

Cases live in `bench_*.py` beside this file; each has a list GROUPS.
"""

import argparse
import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_frame import Group, measure_peak, measure_peak_here, measure_times, set_threads, table, warn_if_starved

CASE_MODULES = ("bench_kda", "bench_ops")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", default="", help="only operations whose name contains this")
    parser.add_argument("--shape", default="", help="only shapes whose label contains this")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget", type=float, default=10.0, help="seconds per backend, after three rounds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: for a busy machine, one thread")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--peak", nargs=3, metavar=("OP", "SHAPE", "BACKEND"), help="print one peak in bytes and exit")
    args = parser.parse_args()
    set_threads(args.threads)
    groups: list[Group] = [g for name in CASE_MODULES for g in importlib.import_module(name).GROUPS]
    if args.peak:
        op, shape, backend = args.peak
        group = next(g for g in groups if (g.op, g.shape) == (op, shape))
        print(measure_peak_here(group.backends[backend]()))
        return
    rows = []
    for group in groups:
        if args.op not in group.op or args.shape not in group.shape:
            continue
        measured = measure_times(group, args.rounds, args.budget, args.clock)
        warn_if_starved(measured, args.threads)
        if group.memory and not args.no_memory:
            for row in measured:
                row.peak = measure_peak(group, row.backend, args.threads)
        rows += measured
        print(f"measured: {group.op}, {group.shape}", file=sys.stderr, flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
