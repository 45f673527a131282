"""The command line: `kimi3-eval run MODEL …`. Bad input ends with one sentence and exit code 2."""

import argparse
import os
import sys
from pathlib import Path


def parser() -> argparse.ArgumentParser:
    """The arguments of every subcommand."""
    top = argparse.ArgumentParser(prog="kimi3-eval", description="How far back a model retrieves, offline.")
    commands = top.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run tasks on a checkpoint", description=run_tasks.__doc__)
    run.add_argument("model", metavar="MODEL", help="checkpoint directory")
    run.add_argument("--tasks", default="niah_single_1", help="comma-separated names; any lm-eval task works too")
    run.add_argument("--lengths", default="1024", help="tokens of prompt and answer together, as in 512,4k")
    run.add_argument("--depths", default="5", help="needle depths from 0 to 1, as in 0,0.5,1, or how many")
    run.add_argument("--samples", type=int, default=10, help="samples for each length and depth")
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
    run.set_defaults(action=run_tasks)
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

    from .model import Kimi3LM
    from .results import table
    from .run import execute, open_directory, process_index

    output = Path(args.output)
    if process_index() == 0:
        open_directory(output, plan)
        tokens = sum(doc["prompt_tokens"] for docs in built.values() for doc in docs)
        count = sum(map(len, built.values()))
        print(f"{count} prompts, {tokens} tokens, into {output}", file=sys.stderr)
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
        print(table(results))
        print(f"written to {output / 'results.json'}")


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
