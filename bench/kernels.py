"""``tilewise bench kernels``: correctness gate, then ours and the peers interleaved."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilewise.bench import options, report
from tilewise.bench.cases import CASES, GROUPS, Case, select_cases, shrink

EXIT_OK, EXIT_GATE, EXIT_USAGE, EXIT_DEVICE = 0, 1, 2, 3
# After this many seconds over its budget a run is taken to hang.
GRACE_SECONDS = 240.0
# Names in `tilewise.bench.providers`, which --help must not import.
PROVIDERS = (
    "tilewise", "tilewise_p16", "tilewise_p128", "tilewise_hnd", "tilewise_plain",
    "tilewise_shared", "tilewise_fp8", "tilewise_fp8_plain", "fa3", "fa3_best", "flashinfer",
    "flashinfer_cascade", "triton_attn", "cudnn",
)  # fmt: skip
DEFAULT_PROVIDERS = "tilewise,tilewise_p16,fa3,fa3_best,triton_attn,cudnn"


class DeviceLost(RuntimeError):
    """The CUDA context no longer works; nothing after this can be measured."""


@dataclass
class Prepared:
    """A provider that passed the gate for the current case."""

    runner: Any
    timer: Any
    path: str
    gate: Any
    tried: dict[str, float | str] = field(default_factory=dict)


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of ``tilewise bench kernels``."""
    parser = argparse.ArgumentParser(
        prog="tilewise bench kernels", description=__doc__,
        epilog="Exit codes: 0; 1 if a result failed the correctness gate; 2 for a wrong command "
        "line or no GPU; 3 if the GPU stopped working.",
    )  # fmt: skip
    parser.add_argument(
        "--cases", nargs="*", default=["all"], metavar="PATTERN",
        help="names of --list, globs (dec_*) or groups "
        f"({', '.join(GROUPS)}); a leading - takes out (--cases=-fp8) (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--providers", default=DEFAULT_PROVIDERS, metavar="NAMES",
        help=f"comma-separated, of {', '.join(PROVIDERS)} (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--versions", nargs="*", default=[], metavar="NAME=FOLDER",
        help="kernels of other checkouts as well, as NAME and, where the cache is fp8, NAME_fp8; "
        "speeds in the table are then relative to the first (default: none)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, metavar="FILE.json",
        help="result file, with an HTML page and a markdown table beside it (default: none)",
    )  # fmt: skip
    options.add_layers(parser, 32)
    options.add_turns(parser, 7, 40.0, "provider")
    options.add_budget(parser, 1500.0, "start no further case after")
    parser.add_argument("--gate-only", action="store_true", help="check results, time nothing")
    parser.add_argument("--no-ceilings", action="store_true", help="skip matmul and copy rates")
    parser.add_argument("--list", action="store_true", help="list the cases and stop")
    options.add_record(parser, "print the result as JSON at the end")
    parser.add_argument(
        "--smoke", action="store_true",
        help="shrink every case and run on whatever there is; the times mean nothing",
    )  # fmt: skip
    return parser


class Suite:
    """One run over all cases and providers; rows accumulate and are saved after every case."""

    def __init__(self, args: argparse.Namespace, providers: dict[str, Any], env: Any) -> None:
        from tilewise.bench.gpu import GpuMonitor
        from tilewise.bench.providers import provider_errors

        self.args = args
        self.providers = providers
        self.env = env
        self.rows: list[report.Row] = []
        self.device = "cuda" if env.get("gpu") else "cpu"
        self.errors = provider_errors()
        self.monitor = GpuMonitor.start() if self.device == "cuda" else GpuMonitor()
        self.missing = {name: provider.missing() for name, provider in providers.items()}
        self.deadline = time.monotonic() + args.budget_seconds

    def save(self) -> None:
        """Write what is known so far."""
        self.env["clocks"] = self.monitor.summary()
        self.env["missing"] = {name: why for name, why in self.missing.items() if why}
        if self.args.out is not None:
            report.write_result(self.args.out, self.env, self.rows)

    def run(self, cases: Sequence[Case]) -> int:
        """Run all cases; return the exit code."""
        for number, case in enumerate(cases, 1):
            if time.monotonic() > self.deadline:
                self._skip(cases[number - 1 :])
                break
            print(f"[{number}/{len(cases)}] {case.name}", end="", flush=True)
            start = time.monotonic()
            try:
                self._run_case(case)
            except self.errors as error:
                text = f"{type(error).__name__}: {error}"[:500]
                print(f"\n  {text}", flush=True)
                self.rows += [report.failed_row(case, name, text) for name in self.providers]
                self._assert_device(error)
                self._free()
            self.save()
            print(f"  {time.monotonic() - start:.1f} s", flush=True)
        self.save()
        return EXIT_GATE if any(row.get("gate") == "failed" for row in self.rows) else EXIT_OK

    def _skip(self, cases: Sequence[Case]) -> None:
        why = f"not measured: the budget of {self.args.budget_seconds:.0f} s was spent"
        print(f"{len(cases)} cases {why}", flush=True)
        self.rows += [report.failed_row(c, name, why) for c in cases for name in self.providers]

    def _run_case(self, case: Case) -> None:
        from tilewise.bench.inputs import CaseInputs
        from tilewise.bench.timing import interleave, summarize

        inputs = CaseInputs(case, self.device, self.args.layers)
        ready: dict[str, Prepared] = {}
        failed: dict[str, report.Row] = {}
        for name, provider in self.providers.items():
            outcome = self._prepare(name, provider, case, inputs)
            if isinstance(outcome, Prepared):
                ready[name] = outcome
            else:
                failed[name] = outcome
        if ready and not self.args.gate_only:
            timers = {name: item.timer for name, item in ready.items()}
            times = interleave(timers, self.args.rounds, self.args.burst_ms)
        for name in self.providers:
            if name in failed:
                self.rows.append(failed[name])
                continue
            item = ready[name]
            extra = {"worst_row": item.gate.worst_row, "copies": inputs.copies, "gate": "passed"}
            if len(item.tried) > 1:
                extra["tried"] = item.tried
            if self.args.gate_only:
                row = report.failed_row(case, name, "not timed", path=item.path, **extra)
                row["rel_error"] = item.gate.rel_error
            else:
                summary = summarize(times[name])
                row = report.timed_row(
                    case, name, summary.median_us, summary.spread_us, item.gate.rel_error, item.path
                )
                row.update(layers=item.timer.layers, samples=summary.samples, **extra)
            self.rows.append(row)
        ready.clear()
        del inputs
        self._free()

    def _free(self) -> None:
        gc.collect()
        if self.device == "cuda":
            import torch

            torch.cuda.empty_cache()

    def _prepare(self, name: str, provider: Any, case: Case, inputs: Any) -> Prepared | report.Row:
        """Build, check and capture one provider's best candidate, or return its failed row."""
        why = self.missing[name] or provider.unsupported(case)
        if why:
            return report.failed_row(case, name, why)
        best: Prepared | None = None
        best_us = float("inf")
        tried: dict[str, float | str] = {}
        gate_failed = False
        for label, build in provider.candidates(case, inputs).items():
            try:
                item, microseconds = self._try(build, inputs)
            except self.errors as error:
                tried[label] = f"{type(error).__name__}: {error}"[:500]
                self._assert_device(error)
                continue
            if not item.gate.passed:
                tried[label] = f"gate: {item.gate.reason}"
                gate_failed = True
                continue
            tried[label] = round(microseconds, 3)
            if microseconds < best_us:
                best, best_us = item, microseconds
        if best is not None:
            best.tried = tried
            return best
        text = "; ".join(f"{label}: {what}" for label, what in tried.items())
        print(f"\n  {name}: {text[:300]}", flush=True)
        extra = {"gate": "failed"} if gate_failed else {}
        return report.failed_row(case, name, text, **extra)

    def _try(self, build: Any, inputs: Any) -> tuple[Prepared, float]:
        """Run one candidate on poisoned outputs, check it, capture it and time it briefly."""
        from tilewise.bench.timing import GraphTimer, HostTimer, estimate_us, layers_for

        inputs.poison_outputs()
        runner = build()
        runner.calls[0]()
        gate = inputs.check()
        item = Prepared(runner, None, runner.path(), gate)
        if not gate.passed or self.args.gate_only:
            return item, 0.0
        one = estimate_us(runner.calls[0], inputs.device)
        layers = layers_for(one, self.args.layers, inputs.copies)
        if self.device == "cuda":
            item.timer = GraphTimer(runner.calls, layers, self.monitor)
        else:
            item.timer = HostTimer(runner.calls, 1)
        return item, min(item.timer.burst(3)[1:])

    def _assert_device(self, error: Exception) -> None:
        """Stop the run if a failed launch took the CUDA context with it."""
        if self.device != "cuda":
            return
        import torch

        if isinstance(error, DeviceLost):
            raise error
        try:
            torch.cuda.synchronize()
        except RuntimeError as lost:
            raise DeviceLost(f"{error} (then: {lost})") from error


def _pick_providers(names: str, folders: Sequence[str]) -> dict[str, Any]:
    from tilewise.bench import versions
    from tilewise.bench.providers import registry

    others = versions.providers(versions.parse(folders)) if folders else {}
    wanted = [name for name in names.split(",") if name]
    known = registry()
    unknown = [name for name in wanted if name not in known]
    if unknown or not (wanted or others):
        raise ValueError(
            f"unknown provider {', '.join(unknown) or '(none)'}; known: {', '.join(known)}"
        )
    taken = [name for name in others if name in known]
    if taken:
        raise ValueError(f"a version cannot be named {taken[0]}: a provider is")
    return others | {name: provider for name, provider in known.items() if name in wanted}


def _without_gpu(args: argparse.Namespace) -> None:
    """Where there is no GPU, check ours in Triton's interpreter; its times would say nothing."""
    import torch

    if torch.cuda.is_available():
        return
    # Before anything imports Triton, which looks at it once.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if args.providers == DEFAULT_PROVIDERS:
        args.providers = "tilewise,tilewise_p16"
        args.gate_only = True


def _list_cases(cases: Sequence[Case]) -> None:
    for case in cases:
        heads = f"{case.num_q_heads}/{case.num_kv_heads}/{case.head_dim}"
        work = f"{case.flops / 1e9:10.1f} GFLOP {case.bytes_moved / 1e6:9.1f} MB"
        print(f"{case.name:24} {case.num_reqs:4} reqs {case.num_tokens:6} tokens {heads:10} {work}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns
    -------
    int
        0; 1 if a result failed the correctness gate; 2 for a wrong command line or no GPU;
        3 if the GPU stopped working.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    args = build_parser().parse_args(argv)
    if args.smoke:
        _without_gpu(args)
    try:
        cases = select_cases(args.cases)
        providers = {} if args.list else _pick_providers(args.providers, args.versions)
    except ValueError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    if args.list:
        _list_cases(cases)
        return EXIT_OK
    answer = sys.stdout
    with contextlib.redirect_stdout(sys.stderr if args.json else answer):
        suite, code = _measure(args, argv, cases, providers)
        if suite is None:
            return code
        if args.json:
            print(report.result_text(suite.env, suite.rows), file=answer)
        else:
            base = args.versions[0].partition("=")[0] if args.versions else "fa3"
            print(report.kernel_table(suite.rows, base))
        if args.out is not None and suite.rows:
            report.write_pages(args.out)
    return code


def _measure(
    args: argparse.Namespace, argv: Sequence[str], cases: list[Case], providers: dict[str, Any]
) -> tuple[Suite | None, int]:
    """Run the suite; return it, unless there is nothing to run it on, and the exit code."""
    from tilewise.bench.gpu import ceilings

    command = ["tilewise", "bench", "kernels", *argv]
    env = report.describe_environment(command, args.commit) | report.describe_gpu()
    env["suite"] = {"cases": len(CASES), "layers": args.layers, "rounds": args.rounds}
    if args.smoke:
        env["smoke"] = "cases were shrunk; the times mean nothing"
        cases = [shrink(case, 96, 3) for case in cases]
        args.layers = min(args.layers, 2)
    elif env["gpu"] is None:
        print("no CUDA device; --smoke runs shrunken cases without one", file=sys.stderr)
        return None, EXIT_USAGE
    else:
        # A kernel that hangs cannot be caught: end the process; finished cases are on disk.
        limit = args.budget_seconds + GRACE_SECONDS
        faulthandler.dump_traceback_later(limit, exit=True, file=2)
    suite = Suite(args, providers, env)
    for name, why in suite.missing.items():
        if why:
            print(f"{name}: missing: {why}", flush=True)
    if env["gpu"] is not None and not args.no_ceilings:
        env.update(ceilings())
        print(f"matmul {env['matmul_tflops']} TFLOP/s, copy {env['copy_tbps']} TB/s", flush=True)
    try:
        code = suite.run(cases)
    except DeviceLost as error:
        print(f"\nthe GPU stopped working: {error}", file=sys.stderr)
        env["device_lost"] = str(error)[:2000]
        suite.save()
        code = EXIT_DEVICE
    finally:
        faulthandler.cancel_dump_traceback_later()
    return suite, code


if __name__ == "__main__":
    raise SystemExit(main())
