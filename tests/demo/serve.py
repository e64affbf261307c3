"""Start `vllm serve` on tilewise's backend, ask it something, bench it, read /metrics, stop it."""

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from demo_common import (
    BACKEND,
    FIRST_QUESTION,
    MODEL_NAME,
    ROOT,
    Checks,
    engine_environment,
    log_tail,
    pick_device,
    say,
    write_report,
)

START_TIMEOUT_S = 600
STOP_TIMEOUT_S = 30
SHOWN_METRICS = re.compile(
    r"(vllm:(prompt_tokens_total|generation_tokens_total|request_success_total"
    r"|prefix_cache_hits_total|time_to_first_token_seconds_count)|tilewise)"
)
# (requests, prompt tokens, answer tokens, at once): a few seconds' work on either device.
BENCH_SIZES = {"cpu": (3, 24, 3, 3), "gpu": (32, 256, 64, 8)}

# Straight to this machine, whatever proxy the environment names.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def vllm_command(*arguments: str) -> list[str]:
    """Return the command line of the `vllm` that belongs to this interpreter."""
    script = Path(sys.executable).with_name("vllm")
    launcher = [str(script)] if script.exists() else ["-m", "vllm.entrypoints.cli.main"]
    return [sys.executable, *launcher, *arguments]


def free_port() -> int:
    """Return a port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fetch(url: str, body: dict[str, Any] | None = None, timeout: float = 300) -> str:
    """Return what `url` answers to a GET, or to a POST of `body` as JSON."""
    request = urllib.request.Request(url, headers={"Content-Type": "application/json"})
    data = None if body is None else json.dumps(body).encode()
    with _opener.open(request, data, timeout=timeout) as response:
        return str(response.read().decode())


def start_server(model: str, device: str, port: int, log: Path) -> subprocess.Popen[bytes]:
    """Start the server in a process group of its own, its output going to `log`."""
    command = vllm_command(
        *("serve", model, "--served-model-name", MODEL_NAME),
        *("--attention-backend", BACKEND, "--host", "127.0.0.1", "--port", str(port)),
        *("--max-model-len", "512"),
    )
    if device == "cpu":
        command += ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", "4"]
        command += ["--max-num-batched-tokens", "256", "--kv-cache-memory-bytes", str(128 << 20)]
    else:
        command += ["--dtype", "bfloat16", "--max-num-seqs", "32"]
        command += ["--kv-cache-memory-bytes", str(1 << 30), "--gpu-memory-utilization", "0.1"]
    say("  $ vllm " + " ".join(command[command.index("serve") :]))
    with log.open("wb") as sink:
        return subprocess.Popen(
            command,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=engine_environment(device),
            start_new_session=True,
        )


def wait_until_healthy(server: subprocess.Popen[bytes], base: str) -> bool:
    """Wait until /health answers; give up if the server leaves or takes too long."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while server.poll() is None and time.monotonic() < deadline:
        try:
            fetch(base + "/health", timeout=5)
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
        else:
            return True
    return False


def group_alive(group: int) -> bool:
    """Whether any process of the group is left, zombies aside.

    In a container nobody may collect the zombies of processes whose parent has gone.
    """
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # After the name, which may hold anything: state, parent, process group.
            state, _, process_group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(process_group) == group and state not in "ZX":
            return True
    return False


def stop_server(server: subprocess.Popen[bytes], patience_s: float) -> str:
    """End the server and every process it started; say how."""
    how = "had left by itself"
    if server.poll() is None:
        how = "left on SIGTERM"
        server.send_signal(signal.SIGTERM)
    try:
        server.wait(patience_s)
    except subprocess.TimeoutExpired:
        how = "had to be killed"
    # The engine's processes may outlive a server that died.
    if group_alive(server.pid):
        for name in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(server.pid, name)
            except ProcessLookupError:
                break
            deadline = time.monotonic() + 5
            while group_alive(server.pid) and time.monotonic() < deadline:
                server.poll()
                time.sleep(0.1)
    server.wait(STOP_TIMEOUT_S)
    return f"{how}, exit code {server.returncode}"


def ask(base: str, max_tokens: int) -> dict[str, Any]:
    """Ask the chat endpoint the demo's first question."""
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": FIRST_QUESTION}],
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    return dict(json.loads(fetch(base + "/v1/chat/completions", body)))


def run_bench(base: str, model: str, device: str, folder: Path) -> dict[str, Any]:
    """Run `vllm bench serve` against the server and return its result file."""
    requests, prompt, answer, at_once = BENCH_SIZES[device]
    result = folder / "bench.json"
    result.unlink(missing_ok=True)
    command = vllm_command(
        *("bench", "serve", "--backend", "openai", "--base-url", base),
        *("--model", MODEL_NAME, "--tokenizer", model, "--dataset-name", "random"),
        *("--random-input-len", str(prompt), "--random-output-len", str(answer)),
        *("--num-prompts", str(requests), "--max-concurrency", str(at_once)),
        *("--ignore-eos", "--temperature", "0", "--seed", "0", "--save-result"),
        *("--result-dir", str(folder), "--result-filename", result.name),
    )
    say("  $ vllm " + " ".join(command[command.index("bench") :]))
    log = folder / "bench.log"
    with log.open("wb") as sink:
        code = subprocess.run(
            command,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=engine_environment(device),
            timeout=600,
        ).returncode
    if code or not result.exists():
        say(log_tail(log))
        return {"completed": 0, "failed": requests, "num_prompts": requests}
    return dict(json.loads(result.read_text()))


def metric_sum(metrics: str, name: str) -> float:
    """Add up the samples of one metric over its labels."""
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in metrics.splitlines()
        if line.startswith((name + "{", name + " "))
    )


def exercise(checks: Checks, args: argparse.Namespace, base: str, device: str) -> dict[str, Any]:
    """Send the requests and check what comes back."""
    reply = ask(base, max_tokens=16)
    answer = str(reply["choices"][0]["message"]["content"]).strip()
    say(f"    user:  {FIRST_QUESTION}")
    say(f"    model: {answer}")
    if args.expect:
        checks.add("/v1/chat/completions gives the expected answer", answer == args.expect)
    else:
        checks.add("/v1/chat/completions answers", bool(answer))
    bench = run_bench(base, args.model, device, args.work)
    checks.add(
        "vllm bench serve: every request completed",
        bench["failed"] == 0 and bench["completed"] == bench["num_prompts"] > 0,
        f"{bench['completed']} completed, {bench['failed']} failed",
    )
    if "mean_ttft_ms" in bench:
        say(
            f"    {bench['output_throughput']:.1f} output tokens/s, mean TTFT"
            f" {bench['mean_ttft_ms']:.0f} ms, mean TPOT {bench['mean_tpot_ms']:.0f} ms"
            + (" (an interpreter's: no figure of the kernels' speed)" if device == "cpu" else "")
        )
    metrics = fetch(base + "/metrics")
    for line in metrics.splitlines():
        if SHOWN_METRICS.match(line) and not line.endswith(" 0.0"):
            say("    " + line)
    generated = metric_sum(metrics, "vllm:generation_tokens_total")
    expected = reply["usage"]["completion_tokens"] + bench.get("total_output_tokens", 0)
    checks.add(
        "/metrics counts the tokens that were generated",
        generated >= expected > 0,
        f"{generated:.0f}, at least {expected} expected",
    )
    return {"answer": answer, "bench": bench}


def check_log(checks: Checks, log: Path) -> None:
    """Check that the server says which backend it uses, and show the lines.

    The CPU test platform does not log vLLM's choice as the CUDA platform does, but tilewise
    always says for which layers it was built.
    """
    text = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(errors="replace"))
    for line in re.findall(rf"Using \S*{BACKEND}\S* backend.*|tilewise attends in .*", text):
        say(f"    server.log: {line[:150]}")
    checks.add(
        f"the server's log says that {BACKEND} computes the layers",
        re.search(r"tilewise attends in [1-9]\d* layers", text) is not None,
    )


def main() -> int:
    """Serve, ask, bench, measure, stop; leave a report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder that convert.py made")
    parser.add_argument("--device", choices=("auto", "gpu", "cpu"), default="auto")
    parser.add_argument("--work", type=Path, default=ROOT / ".demo", help="folder for logs")
    parser.add_argument("--report", type=Path, default=ROOT / ".demo" / "serve.json")
    parser.add_argument("--expect", help="the answer that the chat endpoint has to give")
    args = parser.parse_args()
    # A terminated demo still has to stop its server: leave through the finally clause.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    device = pick_device(args.device)
    args.work.mkdir(parents=True, exist_ok=True)
    log = args.work / "server.log"
    started = time.monotonic()
    checks = Checks()
    found: dict[str, Any] = {}
    healthy = False
    port = free_port()
    server = start_server(args.model, device, port, log)
    try:
        base = f"http://127.0.0.1:{port}"
        healthy = wait_until_healthy(server, base)
        seconds = time.monotonic() - started
        if checks.add("the server is up", healthy, f"after {seconds:.0f} s"):
            check_log(checks, log)
            found = exercise(checks, args, base, device)
        else:
            say(log_tail(log))
    except (urllib.error.URLError, OSError, KeyError, subprocess.TimeoutExpired) as error:
        checks.add("the server answers", False, repr(error))
        say(log_tail(log))
    finally:
        # A second signal must not cut the clean-up short.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        # One that is still starting does not listen to SIGTERM.
        how = stop_server(server, STOP_TIMEOUT_S if healthy else 2)
    checks.add("the server is gone", not group_alive(server.pid), how)
    write_report(args.report, checks, started, **found)
    return 0 if checks.passed else 1


if __name__ == "__main__":
    sys.exit(main())
