"""The command ``tilewise doctor``: what would run here, and what is wrong.

It changes nothing and starts no engine. ``docs/doctor.md`` describes the output of ``--json``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tilewise import policy, settings
from tilewise.arch import ACCEPTED, ARCHITECTURES, parse_arch
from tilewise.errors import UnsupportedConfig
from tilewise.integration import doctor_checks as checks
from tilewise.integration import doctor_report
from tilewise.integration.doctor_model import (
    ModelReport,
    Server,
    examine,
    load_config,
    model_problems,
)
from tilewise.model_config import Options

SCHEMA = 1
# Tiles are shown for this one where there is neither a GPU nor --arch.
DEFAULT_ARCH = 90


@dataclass(frozen=True)
class Report:
    """Everything the command says."""

    problems: tuple[checks.Problem, ...]
    versions: dict[str, str | None]
    gpus: tuple[checks.Gpu, ...]
    registration: checks.Registration
    settings: tuple[checks.Setting, ...]
    model: ModelReport | None

    @property
    def ok(self) -> bool:
        """Whether nothing fatal was found."""
        return all(problem.severity != "fatal" for problem in self.problems)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as ``--json`` prints it."""
        return {"schema": SCHEMA, "ok": self.ok, **asdict(self)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tilewise doctor",
        description="Say what tilewise would do here: versions, GPU, registration in vLLM, "
        "settings, and for a model who computes each of its layers.",
        epilog="Exit codes: 0; 1 if something is fatal; 2 for a wrong command line.",
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL",
        help="a model's folder, its config.json, or its name on the Hugging Face hub (default: "
        "none, the installation alone)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON (docs/doctor.md)")
    parser.add_argument(
        "--arch", metavar="sm_NN",
        help=f"choose tiles for this architecture, of {ACCEPTED} (default: the GPU's)",
    )  # fmt: skip
    served = parser.add_argument_group("options of `vllm serve` that change the answer")
    served.add_argument(
        "--dtype", default="auto", help="the model's dtype (default: auto, as its config.json says)"
    )
    served.add_argument(
        "--kv-cache-dtype", default="auto", metavar="DTYPE",
        help="the KV cache's: auto, fp8, fp8_e4m3, fp8_e5m2, … (default: auto, the model's)",
    )  # fmt: skip
    for names, default, text in (
        (("--block-size",), None, "tokens of a page (default: what vLLM would take)"),
        (("--tensor-parallel-size", "-tp"), 1, "GPUs that share each layer (default: 1)"),
        (("--max-num-seqs",), 1024, "requests of a step, at most (default: 1024)"),
        (("--max-num-batched-tokens",), 8192, "tokens of a step, at most (default: 8192)"),
    ):
        served.add_argument(*names, type=_count, default=default, metavar="N", help=text)
    served.add_argument(
        "--num-speculative-tokens", type=int, default=0, metavar="N",
        help="draft tokens of a request (default: 0)",
    )  # fmt: skip
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: a whole number from 1")
    return int(text)


def _device(arch: str | None, gpus: tuple[checks.Gpu, ...]) -> policy.Device:
    """The GPU that tiles are chosen for."""
    if arch is not None:
        return parse_arch(arch)
    if gpus and gpus[0].capability >= (8, 0):
        first = gpus[0]
        major, minor = first.capability
        return policy.Device(major * 10 + minor, first.sms, first.shared_memory)
    return ARCHITECTURES[DEFAULT_ARCH]


def diagnose(args: argparse.Namespace) -> Report:
    """Collect the report for a parsed command line.

    Raises
    ------
    UnsupportedConfig
        If the model or the architecture that was named cannot be read.
    """
    gpus = checks.gpus()
    device = _device(args.arch, gpus)
    found = checks.settings_found()
    registered = checks.registration()
    versions = checks.versions()
    problems = [
        *checks.version_problems(versions),
        *checks.gpu_problems(gpus),
        *checks.setting_problems(found),
    ]
    unreadable = {setting.problem for setting in found if setting.problem}
    if registered.why_not is not None and registered.why_not not in unreadable:
        problems.append(checks.Problem("fatal", "registration", registered.why_not))
    model = None
    if args.model is not None:
        capability = gpus[0].capability if gpus and args.arch is None else divmod(device.arch, 10)
        options = Options(
            args.dtype, args.kv_cache_dtype, args.block_size, args.tensor_parallel_size, capability
        )
        ours = _settings(found)
        server = Server(
            args.max_num_seqs, args.max_num_batched_tokens, args.num_speculative_tokens,
            ours.shared_prefixes, ours.fp8_attention,
        )  # fmt: skip
        model = examine(load_config(args.model), options, server, device, args.model)
        problems += model_problems(model, ours.fallback)
    return Report(tuple(problems), versions, gpus, registered, found, model)


def _settings(found: tuple[checks.Setting, ...]) -> settings.Settings:
    """What the environment asks for; the default of what cannot be read."""
    unreadable = {setting.name for setting in found if setting.problem}
    return settings.load_settings({k: v for k, v in os.environ.items() if k not in unreadable})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, or 1 when something is fatal, or 2 for wrong usage."""
    args = _parser().parse_args(argv)
    try:
        # vLLM logs to standard output, where only the report belongs.
        with contextlib.redirect_stdout(sys.stderr):
            report = diagnose(args)
    except UnsupportedConfig as error:
        print(f"tilewise doctor: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        doctor_report.show(report)
    return 0 if report.ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
