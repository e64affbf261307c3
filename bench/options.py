"""Options that several benchmarks have, each with one text."""

from __future__ import annotations

import argparse


def add_layers(parser: argparse.ArgumentParser, layers: int) -> None:
    """How many launches a CUDA graph holds."""
    parser.add_argument(
        "--layers", type=int, default=layers, metavar="N",
        help="launches in the CUDA graph that is timed, as of a model's layers "
        "(default: %(default)s)",
    )  # fmt: skip


def add_turns(
    parser: argparse.ArgumentParser, rounds: int, burst_ms: float, whose: str = "kernel"
) -> None:
    """How often and how long each is timed."""
    parser.add_argument(
        "--rounds", type=int, default=rounds, metavar="N",
        help=f"turns of each {whose} (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--burst-ms", type=float, default=burst_ms, metavar="MS",
        help="length of a turn in milliseconds (default: %(default)s)",
    )  # fmt: skip


def add_budget(parser: argparse.ArgumentParser, seconds: float, what: str) -> None:
    """When to stop; ``what`` says what that means."""
    parser.add_argument(
        "--budget-seconds", type=float, default=seconds, metavar="S",
        help=f"{what} this many seconds (default: %(default)s)",
    )  # fmt: skip


def add_record(
    parser: argparse.ArgumentParser, json_help: str = "print the result as JSON, not a table"
) -> None:
    """What is recorded beside the figures, and how they are printed."""
    parser.add_argument(
        "--commit", metavar="HASH",
        help="commit to record in the result (default: what git says of the checkout)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help=json_help)
