"""The console script `kimi3-convert`."""

import argparse
import sys
from collections.abc import Sequence

from .inspect import inspect_checkpoint


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns the exit code, 2 for input that cannot be used."""
    parser = argparse.ArgumentParser(prog="kimi3-convert", description="Looks into K3 checkpoints.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    inspect = commands.add_parser(
        "inspect", help="parameters per mechanism and bytes by dtype, from the files' headers"
    )
    inspect.add_argument("directory", help="checkpoint directory, released layout or this package's own")
    inspect.set_defaults(run=lambda args: print(inspect_checkpoint(args.directory).report()))
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except (ValueError, OSError) as error:
        print(f"kimi3-convert: {error}", file=sys.stderr)
        return 2
    return 0
