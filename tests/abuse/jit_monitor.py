"""Nothing is compiled while serving: ``jit_monitor.py --out RESULT.json``.

Servers run with vLLM's ``--jit-monitor-mode=error``, in which a kernel that Triton compiles or
loads after the warm-up ends the engine, under a long varied load: prompts of every length, batches
of every size, prefills among decodes, prefix hits, drafted tokens. The monitor sees every kernel of
vLLM as well, so FLASH_ATTN under the same load is the control. A server that vLLM's own kernels end
is started again with a monitor that only warns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
import time
import urllib.error
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# The checkout itself must not be there: its folder `kernels` would hide another package.
sys.path[:] = [
    str(HERE),
    str(HERE.parent),
    *(p for p in sys.path if Path(p or ".").resolve() != ROOT),
]

import aiohttp  # noqa: E402
import torch  # noqa: E402
from abuse_checks import scrape  # noqa: E402
from abuse_run import Clocks, describe_run, end_on_sigterm, write  # noqa: E402
from abuse_server import Server  # noqa: E402
from tiny_model import TinyLlama  # noqa: E402

OURS, CONTROL = "TILEWISE", "FLASH_ATTN"
DRAFTS = {
    "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4,
}  # fmt: skip
# Servers by name: backend, and what is added to everybody's arguments.
SERVERS: dict[str, tuple[str, list[str]]] = {
    "plain": (OURS, []),
    "ngram": (OURS, ["--speculative-config", json.dumps(DRAFTS)]),
    "fp8": (OURS, ["--kv-cache-dtype", "fp8"]),
    "full_graphs": (OURS, ["-cc.cudagraph_mode=FULL"]),
    "control_plain": (CONTROL, []),
    "control_ngram": (CONTROL, ["--speculative-config", json.dumps(DRAFTS)]),
}
ACTIVE = "monitored JIT compilations during inference will use mode={mode}."
EVENT = re.compile(r"(?:JIT compilation|autotuning)\S* during inference: (\S+?)[.\s]")


@dataclass(frozen=True)
class Load:
    """Bounds of what is asked for: tokens of prompts and answers, requests of a batch, seconds."""

    longest: int
    answer: int
    batch: int
    seconds: float
    timeout: float


@dataclass
class Sent:
    """What was asked for, and what went wrong."""

    requests: int = 0
    prompt_tokens: int = 0
    shortest: int = 1 << 30
    longest: int = 0
    largest_batch: int = 0
    seconds: float = 0.0
    rounds: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


def our_kernels() -> set[str]:
    """Names of all kernels of tilewise."""
    import tilewise.kernels

    found: set[str] = set()
    for folder in tilewise.kernels.__path__:
        for path in Path(folder).glob("*.py"):
            decorated = re.findall(r"^@\S*jit.*\n(?:@.*\n)*def (\w+)", path.read_text(), re.M)
            found.update(decorated)
    return found


def special_lengths(longest: int) -> list[int]:
    """Lengths at which kernels, pages and graphs change their ways, and some between."""
    edges = [2**i + offset for i in range(15) for offset in (-1, 0, 1)]
    return sorted(
        {n for n in (*edges, 3, 12, 1000, 5000, longest - 1, longest) if 0 < n <= longest}
    )


class Client:
    """Sends batches of requests to one server until its time is over."""

    def __init__(self, url: str, load: Load, seed: int) -> None:
        self.url, self.load, self.rng = url, load, random.Random(seed)
        self.sent = Sent()
        self.shared = [self.rng.randrange(4, 260) for _ in range(load.longest)]

    def prompt(self, length: int) -> list[int]:
        """Random tokens."""
        return [self.rng.randrange(4, 260) for _ in range(length)]

    def repeated(self, length: int) -> list[int]:
        """Tokens in which n-grams come again, so that they are drafted."""
        part = self.prompt(7)
        return (part * (length // len(part) + 1))[:length]

    def some_length(self, longest: int) -> int:
        """More short lengths than long ones."""
        return max(1, int(longest ** self.rng.random()))

    def some(self, most: int) -> range:
        """From one to so many requests, but not more than a batch holds."""
        return range(self.rng.randint(1, min(most, self.load.batch)))

    def tokens(self, most: int) -> int:
        """That many tokens of an answer, but not more than it may have."""
        return min(most, self.load.answer)

    async def batch(self, session: aiohttp.ClientSession, requests: list[tuple[list[int], int]]):
        """Send requests at the same time."""
        await asyncio.gather(*(self._one(session, *request) for request in requests))
        self.sent.largest_batch = max(self.sent.largest_batch, len(requests))

    async def _one(self, session: aiohttp.ClientSession, prompt: list[int], tokens: int) -> None:
        body = {
            "model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True,
            "temperature": self.rng.choice((0, 0, 1)),
        }  # fmt: skip
        sent = self.sent
        sent.requests += 1
        sent.prompt_tokens += len(prompt)
        sent.shortest, sent.longest = (
            min(sent.shortest, len(prompt)),
            max(sent.longest, len(prompt)),
        )
        try:
            async with asyncio.timeout(self.load.timeout):
                async with session.post(f"{self.url}/v1/completions", json=body) as answer:
                    text = await answer.text()
            if answer.status != 200:
                sent.problems.append(f"status {answer.status}: {text[:200]}")
        except TimeoutError:
            sent.problems.append(f"{len(prompt)} tokens: no answer in {self.load.timeout:g} s")
        except (aiohttp.ClientError, ConnectionError) as error:
            sent.problems.append(f"{type(error).__name__}: {error}"[:200])

    def singles(self) -> list[list[tuple[list[int], int]]]:
        """One request at a time, of every special length."""
        tokens = min(6, self.load.answer)
        return [[(self.prompt(n), tokens)] for n in special_lengths(self.load.longest)]

    def batches(self) -> list[list[tuple[list[int], int]]]:
        """Batches of every size, decoding for a while."""
        most = self.load.batch
        sizes = sorted({s for i in range(10) for s in (2**i, 3 * 2**i // 2, 2**i + 1) if s <= most})
        return [
            [
                (self.prompt(self.some_length(min(200, self.load.longest))), self.tokens(16))
                for _ in range(size)
            ]
            for size in (*sizes, most, most + most // 4)
        ]

    def mixed(self) -> list[list[tuple[list[int], int]]]:
        """Long prompts among requests that decode."""
        rows = []
        for _ in range(3):
            few = [(self.prompt(self.some_length(2000)), self.tokens(40)) for _ in self.some(40)]
            long = [
                (self.prompt(self.some_length(self.load.longest)), self.tokens(8))
                for _ in self.some(4)
            ]
            rows.append([(p[: self.load.longest], n) for p, n in few + long])
        return rows

    def prefixes(self) -> list[list[tuple[list[int], int]]]:
        """Prompts that begin like earlier ones."""
        longest, rows = self.load.longest, []
        for _ in range(3):
            begin = self.shared[: self.some_length(longest)]
            ends = [self.prompt(self.some_length(300)) for _ in self.some(12)]
            rows.append([((begin + end)[:longest], self.tokens(8)) for end in ends])
        return rows

    def drafted(self) -> list[list[tuple[list[int], int]]]:
        """Repetitive prompts."""
        return [
            [
                (self.repeated(self.some_length(min(4000, self.load.longest))), self.tokens(24))
                for _ in self.some(48)
            ]
            for _ in range(3)
        ]

    async def run(self) -> Sent:
        """Every kind once, and again until the time is over or the server has gone."""
        started = time.monotonic()
        kinds = ("singles", "batches", "mixed", "prefixes", "drafted")
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            while not self.sent.problems:
                for kind in kinds:
                    for requests in getattr(self, kind)():
                        await self.batch(session, requests)
                        over = time.monotonic() - started > self.load.seconds
                        if self.sent.problems or (over and self.sent.rounds["drafted"]):
                            break
                    self.sent.rounds[kind] += 1
                if time.monotonic() - started > self.load.seconds:
                    break
        self.sent.seconds = round(time.monotonic() - started, 1)
        return self.sent


def run_once(
    name: str, mode: str, model: Path, folder: Path, gpu: bool, arguments: list[str], load: Load
) -> dict[str, Any]:
    """One server under the whole load."""
    backend, more = SERVERS[name]
    row: dict[str, Any] = {"server": name, "backend": backend, "mode": mode}
    server = Server(
        model, folder / f"{name}_{mode}",
        ["--attention-backend", backend, "--jit-monitor-mode", mode, *arguments, *more], gpu,
        alone=False,
    )  # fmt: skip
    problems: list[str] = []
    try:
        row["start_seconds"] = round(server.wait_until_up(load.timeout), 1)
        sent = asyncio.run(Client(server.url, load, seed=1).run())
        row |= {k: v for k, v in vars(sent).items() if k != "problems"}
        problems += sent.problems[:5]
        if not sent.problems:
            time.sleep(2.5)  # workers write their metrics once a second
            row["metrics"] = pick_metrics(scrape(server))
        row["exit_code"] = server.stop()
    except (RuntimeError, OSError, urllib.error.URLError) as error:
        problems.append(f"{type(error).__name__}: {error}"[-800:])
    finally:
        server.kill()
    text = server.text()
    row["active"] = ACTIVE.format(mode=mode) in text
    ours = our_kernels()
    events = Counter(EVENT.findall(text))
    row["compiled_ours"] = {k: n for k, n in events.items() if k in ours}
    row["compiled_others"] = {k: n for k, n in events.items() if k not in ours}
    row["problems"] = problems
    return row


def pick_metrics(found: dict[str, float]) -> dict[str, float]:
    """What says that the load was as varied as it was meant to be, and what was compiled."""
    wanted = (
        "tilewise_steps_total", "tilewise_graph_steps_total{", "tilewise_steps_total{",
        "tilewise_kernel_compilations_total{", "tilewise_fallback_layers_total",
        "vllm:prefix_cache_hits_total", "vllm:prompt_tokens_total", "vllm:generation_tokens_total",
        "vllm:num_preemptions_total", "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total",
    )  # fmt: skip
    return {
        name: value for name, value in found.items()
        if name in wanted or any(w.endswith("{") and name.startswith(w) for w in wanted)
    }  # fmt: skip


def judge(row: dict[str, Any], gpu: bool) -> list[str]:
    """Why a server of ours is not as it should be; a control is judged by nobody."""
    if row["backend"] != OURS:
        return []
    problems = [f"{row['server']}: {text}" for text in row["problems"]]
    if row["mode"] == "error" and row["compiled_others"] and not row["compiled_ours"]:
        # vLLM's own kernels ended the engine, and `compiled_others` says which; that is what the
        # controls are for.
        problems = []
    if row["compiled_ours"]:
        problems.append(f"{row['server']}: compiled while serving: {row['compiled_ours']}")
    if gpu and not row["active"]:
        problems.append(f"{row['server']}: the monitor was not active")
    for name, value in row.get("metrics", {}).items():
        if "compilations_total{" in name and "phase=serving" in name and value:
            problems.append(f"{row['server']}: {name} is {value:g}")
    drafts = row.get("metrics", {}).get("vllm:spec_decode_num_draft_tokens_total", 0)
    if "ngram" in row["server"] and "metrics" in row and not drafts:
        problems.append(f"{row['server']}: no token was drafted")
    return problems


def sizes(gpu: bool, seconds: float, folder: Path) -> tuple[Path, list[str], Load]:
    """Model, arguments of every server and bounds of the load."""
    if not gpu:
        arguments = [
            "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8", "--max-model-len",
            "256", "--max-num-batched-tokens", "64", "--kv-cache-memory-bytes", str(16 << 20),
        ]  # fmt: skip
        return TinyLlama().write(folder / "model"), arguments, Load(40, 3, 4, seconds, 200)
    shape = TinyLlama(
        32, 8, 128, num_layers=4, hidden_size=1024, intermediate_size=2048, max_len=33_000,
        dtype=torch.bfloat16,
    )  # fmt: skip
    arguments = [
        "--dtype", "bfloat16", "--max-num-seqs", "256", "--max-model-len", "33000",
        "--max-num-batched-tokens", "8192", "--kv-cache-memory-bytes", str(5 << 30),
        "--gpu-memory-utilization", "0.05",
    ]  # fmt: skip
    return shape.write(folder / "model"), arguments, Load(32_768, 40, 256, seconds, 240)


def main() -> int:
    """Run the chosen servers side by side; the exit code is 1 when ours compiled anything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--servers", help=f"default: on a GPU {','.join(SERVERS)}; else plain")
    parser.add_argument("--seconds", type=float, default=120, help="of load (%(default)g)")
    parser.add_argument("--commit", help="commit to record, where the checkout has no git folder")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--folder", type=Path, help="for model and logs; default: temporary")
    asked = parser.parse_args()
    end_on_sigterm()
    gpu = torch.cuda.is_available()
    chosen = (asked.servers or (",".join(SERVERS) if gpu else "plain")).split(",")
    if unknown := sorted(set(chosen) - SERVERS.keys()):
        parser.error(f"unknown servers {', '.join(unknown)}; known are {', '.join(SERVERS)}")
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="tilewise-jit-"))
    model, arguments, load = sizes(gpu, asked.seconds, folder)
    env = describe_run("tests/abuse/jit_monitor.py", asked.commit) | {"arguments": arguments}
    rows: list[dict[str, Any]] = []
    problems: list[str] = []

    def one(name: str) -> None:
        for mode in ("error", "warn"):
            row = run_once(name, mode, model, folder, gpu, arguments, load)
            rows.append(row)
            problems.extend(judge(row, gpu))
            env["clocks"] = clocks.summary()
            write(asked.out, {"env": env, "rows": rows, "problems": problems})
            compiled = {**row["compiled_ours"], **row["compiled_others"]}
            print(f"  {name} {mode}: {row.get('requests', 0)} requests, compiled {compiled}, "
                  f"problems {row['problems']}", flush=True)  # fmt: skip
            if not compiled:
                break

    with Clocks() as clocks, ThreadPoolExecutor(len(chosen)) as pool:
        list(pool.map(one, chosen))
    for problem in problems:
        print(f"  {problem}")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
