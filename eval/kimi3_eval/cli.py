"""The command line: `kimi3-eval run MODEL …`. Bad input ends with one sentence and exit code 2."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .plan import Plan


PRESETS = {
    "quick": {
        "tasks": "niah_single_1,niah_single_2,niah_multikey_1",
        "lengths": "1k,2k",
        "depths": "3",
        "samples": 4,
    },
    "full": {
        "tasks": "niah_single_1,niah_single_2,niah_single_3,niah_multikey_1,niah_multikey_2,niah_multikey_3,"
        "niah_multivalue,niah_multiquery,vt,cwe,fwe,mqar,stack,copying,palindrome,loss",
        "lengths": "4k,8k,16k,32k",
        "depths": "5",
        "samples": 20,
    },
}


def parser() -> argparse.ArgumentParser:
    """The arguments of every subcommand."""
    top = argparse.ArgumentParser(prog="kimi3-eval", description="How far back a model retrieves, offline.")
    commands = top.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run tasks on a checkpoint", description=run_tasks.__doc__)
    run.add_argument("model", metavar="MODEL", help="checkpoint directory")
    run.add_argument("--preset", choices=sorted(PRESETS), default="quick", help="gives what is not given otherwise")
    run.add_argument("--tasks", help="comma-separated names; any lm-eval task works too")
    run.add_argument("--lengths", help="tokens of prompt and answer together, as in 512,4k")
    run.add_argument("--depths", help="needle depths from 0 to 1, as in 0,0.5,1, or how many")
    run.add_argument("--samples", type=int, help="samples for each length and depth")
    run.add_argument("--seed", type=int, default=0, help="changes all content")
    run.add_argument("--output", default="runs/latest", help="directory of this run; the same one resumes it")
    run.add_argument("--tokenizer", help="'bytes' or a directory; default: the checkpoint's")
    run.add_argument("--haystack", help=".txt or .json file or directory of .txt files instead of Moby-Dick")
    run.add_argument("--apply-chat-template", action="store_true", help="put prompts into the chat template")
    run.add_argument("--batch-size", type=int, default=1)
    run.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    run.add_argument("--device", help="cpu, cuda, cuda:1, …; default: an accelerator if there is one")
    run.add_argument("--prefill-chunk-size", type=int, help="tokens of a prompt fed at once; bounds memory")
    run.add_argument("--hold-back", default="", help="further columns: softmax-window=W, kda-reset=W, attn-res-newest")
    run.add_argument("--dry-run", action="store_true", help="print prompts, tokens and memory, then stop")
    run.set_defaults(action=run_tasks)
    compare = commands.add_parser("compare", help="put runs side by side", description=compare_runs.__doc__)
    compare.add_argument("runs", nargs="+", metavar="RUN", help="output directories of runs")
    compare.add_argument("--output", default="runs/comparison", help="directory of the comparison")
    compare.set_defaults(action=compare_runs)
    report = commands.add_parser("report", help="make a run's page anew", description=make_report.__doc__)
    report.add_argument("run", metavar="RUN", help="output directory of a run")
    report.set_defaults(action=make_report)
    return top


def run_tasks(args: argparse.Namespace) -> None:
    """Runs tasks on a checkpoint and writes results.json, samples and answers into one directory."""
    from .errors import Refusal
    from .plan import Plan, check, depths_of, lengths_of, load_config, split_tasks, tokenizer_of

    if args.batch_size < 1:
        raise Refusal(f"--batch-size {args.batch_size} must be at least 1.")
    if args.dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise Refusal(f"--dtype {args.dtype} must be auto, float32, bfloat16 or float16.")
    if args.prefill_chunk_size is not None and args.prefill_chunk_size < 1:
        raise Refusal(f"--prefill-chunk-size {args.prefill_chunk_size} must be at least 1.")
    for name, value in PRESETS[args.preset].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    lengths, depths = lengths_of(args.lengths), depths_of(args.depths)
    tasks, foreign = split_tasks([name.strip() for name in args.tasks.split(",") if name.strip()])
    config = load_config(args.model)
    plan = Plan(
        model=args.model,
        tokenizer=tokenizer_of(args.model, args.tokenizer),
        tasks=tasks,
        foreign=foreign,
        lengths=lengths,
        depths=depths,
        samples=args.samples,
        seed=args.seed,
        haystack=args.haystack,
        chat=args.apply_chat_template,
        dtype=args.dtype,
        prefill_chunk_size=args.prefill_chunk_size,
        hold_back=tuple(name.strip() for name in args.hold_back.split(",") if name.strip()),
    )
    built = check(plan, config)

    from .memory import available_bytes, cache_bytes, item_bytes, readable, weight_bytes
    from .run import process_index

    first = process_index() == 0
    output = Path(args.output)
    weights = weight_bytes(Path(args.model), config, args.dtype)
    held = cache_bytes(config, max(lengths), args.batch_size, item_bytes(config, args.dtype))
    free = available_bytes(args.device)
    if first:
        _print_plan(built, plan, readable(weights), readable(held), readable(free))
    if args.dry_run:
        return
    if weights + held > free:
        raise Refusal(
            f"The plan needs {readable(weights + held)} for weights and cache but {readable(free)} are free: use "
            "shorter --lengths, a smaller --batch-size or a narrower --dtype."
        )

    from .model import Kimi3LM
    from .page import write_page
    from .results import table
    from .run import execute, open_directory

    if first:
        open_directory(output, plan)
    lm = Kimi3LM(
        args.model,
        tokenizer=plan.tokenizer,
        dtype=args.dtype,
        device=args.device,
        prefill_chunk_size=args.prefill_chunk_size,
        batch_size=args.batch_size,
    )
    results = execute(plan, output, lm, command=["kimi3-eval", *sys.argv[1:]])
    if results is not None:
        page = write_page({output.name: results}, output)
        spent = results["time"]
        print(table(results))
        print(f"{spent['seconds']:.1f} s, of which {100 * spent['overhead']:.1f}% outside the model")
        print(f"written: {output / 'results.json'}, {page}")


def _print_plan(built: dict[str, list[dict]], plan: "Plan", weights: str, held: str, free: str) -> None:
    """The plan on stderr: prompts and tokens of each task, and memory."""
    for task, docs in built.items():
        tokens = sum(doc["prompt_tokens"] for doc in docs)
        longest = max(doc["length"] for doc in docs)
        print(f"{task:<20}{len(docs):>6} prompts {tokens:>12} tokens   longest with answer {longest}", file=sys.stderr)
    for name in plan.foreign:
        print(f"{name:<20}   by lm-eval", file=sys.stderr)
    print(f"columns: {', '.join(column.name for column in plan.columns)}", file=sys.stderr)
    print(f"memory: weights {weights}, longest cache {held}, free {free}", file=sys.stderr)


def _read_results(directory: str) -> dict:
    from .errors import Refusal

    path = Path(directory) / "results.json"
    if not path.is_file():
        raise Refusal(f"{directory} holds no finished run: there is no results.json in it.")
    return json.loads(path.read_text(encoding="utf-8"))


def compare_runs(args: argparse.Namespace) -> None:
    """Puts finished runs into one table and one page with common plots."""
    from .errors import Refusal
    from .page import write_page
    from .results import table

    names = [Path(run).name for run in args.runs]
    if len(set(names)) < len(names):
        names = list(args.runs)
    if len(set(names)) < len(names):
        raise Refusal("compare needs different runs, but one is named twice.")
    runs = {name: _read_results(run) for name, run in zip(names, args.runs)}
    for name, run in runs.items():
        print(f"== {name}")
        print(table(run))
    print(f"written: {write_page(runs, Path(args.output))}")


def make_report(args: argparse.Namespace) -> None:
    """Makes the page and plots of a finished run anew from its results.json."""
    from .page import write_page

    print(f"written: {write_page({Path(args.run).name: _read_results(args.run)}, Path(args.run))}")


def main(argv: list[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    args = parser().parse_args(argv)
    from .errors import Refusal

    try:
        args.action(args)
    except Refusal as refusal:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"kimi3-eval: {refusal}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
