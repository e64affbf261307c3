"""``tilewise bench serve`` without a GPU: commands, turns, resuming, failures, workloads."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tilewise.bench import report, serve, serve_client, serve_plan, serve_run, workloads

FIGURES = {
    "completed": 128, "failed": 0, "request_throughput": 25.8, "output_throughput": 3300.0,
    "p50_ttft_ms": 1.0, "p99_ttft_ms": 2.0, "p50_tpot_ms": 3.0, "p99_tpot_ms": 4.0,
}  # fmt: skip
SLEEP = "import time; time.sleep(60)"
BACKENDS = ["TILEWISE", "CUSTOM", "FLASH_ATTN", "TRITON_ATTN", "A", "B"]
accepted_backends = workloads.accepted_backends


@pytest.fixture(autouse=True)
def backends(monkeypatch):
    """The stand-ins are backends like others, and nothing here needs vLLM."""
    monkeypatch.setattr(workloads, "accepted_backends", lambda: BACKENDS)


def test_commands_of_servers_and_clients(capsys):
    arguments = ["--backends", "TILEWISE,FLASH_ATTN", "--dry-run", "--port", "8123", "--runs", "2"]
    assert serve.main([*arguments, "--serve-args=-cc.cudagraph_mode=FULL"]) == serve.EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    servers = [line for line in lines if " serve MODEL " in line and not line.startswith("  ")]
    clients = [line for line in lines if line.startswith("  ")]
    assert [re.search(r"--attention-backend (\w+)", s)[1] for s in servers] == [
        "TILEWISE", "FLASH_ATTN"
    ]  # fmt: skip
    # Both stand at the same time.
    assert [re.search(r"--port (\d+)", s)[1] for s in servers] == ["8123", "8124"]
    for server in servers:
        assert "--host 127.0.0.1" in server
        assert "--no-enable-prefix-caching" in server
        assert "--load-format dummy" in server
        assert "--gpu-memory-utilization 0.45" in server
        assert server.endswith("-cc.cudagraph_mode=FULL")
        assert int(re.search(r"--max-model-len (\d+)", server)[1]) >= 16384 + 256
    assert len(clients) == 2 * 2 * 2
    for client in clients:
        assert "bench serve" in client
        for option in ("--ignore-eos", "--save-result", "--metric-percentiles 50,90,99"):
            assert option in client
    assert "--random-input-len 16384 --random-output-len 256" in clients[1]
    assert "--num-prompts 16 --max-concurrency 16" in clients[1]


def test_servers_of_prefixes_cache_them_and_may_differ_in_a_setting(capsys):
    ours = "TILEWISE@TILEWISE_SHARED_PREFIXES=on"
    arguments = ["--dry-run", "--runs", "1", "--backends", f"{ours},FLASH_ATTN"]
    assert serve.main([*arguments, "--workloads", "s_prefix4x8k_c64"]) == serve.EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    servers = [line for line in lines if " serve MODEL " in line and not line.startswith("  ")]
    clients = [line for line in lines if line.startswith("  ")]
    assert [re.search(r"--attention-backend (\w+)", s)[1] for s in servers] == [
        "TILEWISE", "FLASH_ATTN"
    ]  # fmt: skip
    assert servers[0].startswith("TILEWISE_SHARED_PREFIXES=on ")
    for server in servers:
        assert " --enable-prefix-caching" in server
        assert "--no-enable-prefix-caching" not in server
    for client in clients:
        assert "--dataset-name prefix_repetition --prefix-repetition-prefix-len 8192" in client
        assert "--prefix-repetition-suffix-len 512 --prefix-repetition-num-prefixes 4" in client
    assert workloads.split_backend(ours) == ("TILEWISE", {"TILEWISE_SHARED_PREFIXES": "on"})
    job = serve_run.Job(ours, [], Path(), 1, Path("logs"), 1, [])
    assert job.environ == {"TILEWISE_SHARED_PREFIXES": "on"}
    log = serve_run.ServerRun(job, 1, 1).server_log
    assert log.name == "server_TILEWISE-TILEWISE_SHARED_PREFIXES-on.log"
    few = workloads.WORKLOADS["s_prefix4x8k_c64"].at_concurrency(3)
    assert few.num_prompts % 4 == 0


def test_without_a_gpu_no_server_is_started(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("TILEWISE_CPU_PLATFORM", raising=False)
    monkeypatch.setattr(serve, "_run", lambda *_: pytest.fail("servers were started"))
    assert serve.main(["--out", str(tmp_path / "serve.json")]) == serve.EXIT_USAGE
    assert "no CUDA device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_each_run_has_other_prompts_and_the_same_for_every_backend(capsys):
    arguments = ["--dry-run", "--backends", "A,B", "--workloads", "s_8k_1k_c8", "--runs", "3"]
    assert serve.main(arguments) == serve.EXIT_OK
    lines = [t for t in capsys.readouterr().out.splitlines() if t.startswith("  ")]
    seeds = [re.search(r"--seed (\d+)", t)[1] for t in lines]
    assert seeds == ["0", "1", "2"] * 2


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--workloads", "s_none"], "known: s_1k_128_c64"),
        (["--concurrency", "4,x"], "--concurrency 'x'"),
        (["--concurrency", "0"], "positive whole numbers"),
        (["--backends", ","], "--backends names none"),
        (
            ["--backends", "A,FLASHATTN@VLLM_X=1"],
            "--backends 'FLASHATTN'; accepted: TILEWISE, CUSTOM, FLASH_ATTN, ",
        ),
        # vLLM would take it, but results are compared by name.
        (["--backends", "tilewise"], "--backends 'tilewise'; accepted: TILEWISE, CUSTOM, "),
        (["--backends", "A@PATH=/"], "'PATH=/' in --backends A@PATH=/; accepted: TILEWISE_"),
        (
            ["--backends", "A@TILEWISE_FALBACK=error"],
            "did you mean TILEWISE_FALLBACK? (in --backends A@",
        ),
        (["--backends", "A@TILEWISE_FALLBACK=1"], "TILEWISE_FALLBACK='1'"),
        (["--workloads", "s_1k_128_c64,s_prefix32k_c64"], "workloads with prefixes, or without"),
        (["--runs", "0"], "--runs 0"),
        (["--resume"], "--resume needs --out"),
    ],
)
def test_usage_errors_name_the_value(arguments, what, capsys):
    assert serve.main(arguments) == serve.EXIT_USAGE
    assert what in capsys.readouterr().err


def test_backends_are_named_as_in_vllm(monkeypatch, capsys):
    registry = pytest.importorskip("vllm.v1.attention.backends.registry")
    monkeypatch.setattr(workloads, "accepted_backends", accepted_backends)
    accepted = accepted_backends()
    assert set(accepted) == {"TILEWISE", "CUSTOM", *registry.AttentionBackendEnum.__members__}
    assert len(accepted) == len(set(accepted))
    # A dry run starts nothing, but prints no command that could not be started either.
    assert serve.main(["--dry-run", "--backends", "TILEWISE,FLASH_ATN"]) == serve.EXIT_USAGE
    answer = capsys.readouterr()
    assert "--backends 'FLASH_ATN'; accepted: TILEWISE, CUSTOM, FLASH_ATTN, " in answer.err
    assert answer.out == ""
    assert serve.main(["--dry-run", "--backends", "TILEWISE,FLASH_ATTN"]) == serve.EXIT_OK


def test_without_vllm_that_is_said(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(workloads, "accepted_backends", accepted_backends)
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", None)
    assert serve.main(["--out", str(tmp_path / "serve.json")]) == serve.EXIT_USAGE
    assert "needs vllm" in (said := capsys.readouterr().err)
    assert "pip install 'tilewise[vllm]'" in said
    assert list(tmp_path.iterdir()) == []


def test_help_exits_with_zero(capsys):
    with pytest.raises(SystemExit) as stop:
        serve.main(["--help"])
    assert stop.value.code == 0
    assert "--resume" in capsys.readouterr().out


def test_turns_interleave_and_who_begins_changes():
    chosen = [workloads.WORKLOADS[n] for n in ("s_1k_128_c64", "s_8k_1k_c8")]
    turns = serve_plan.turns_of(["A", "B"], chosen, 2)
    order = [(t.run, t.workload.name, t.backend) for t in turns]
    assert order == [
        (0, "s_1k_128_c64", "A"), (0, "s_1k_128_c64", "B"),
        (0, "s_8k_1k_c8", "B"), (0, "s_8k_1k_c8", "A"),
        (1, "s_1k_128_c64", "B"), (1, "s_1k_128_c64", "A"),
        (1, "s_8k_1k_c8", "A"), (1, "s_8k_1k_c8", "B"),
    ]  # fmt: skip
    assert serve_plan.groups_of(["A", "B", "C"], 2) == [["A", "B"], ["C"]]


def test_workloads_are_the_named_ones():
    figures = {
        w.name: (w.input_len, w.output_len, w.num_prompts, w.concurrency, w.range_ratio)
        for w in workloads.WORKLOADS.values()
    }
    assert figures == {
        "s_1k_128_c64": (1024, 128, 128, 64, 0.0),
        "s_16k_256_c16": (16384, 256, 16, 16, 0.0),
        "s_8k_1k_c8": (8192, 1024, 16, 8, 0.0),
        "s_8k_1k_c64": (8192, 1024, 64, 64, 0.0),
        "s_ragged_c32": (4096, 256, 128, 32, 0.9),
        "s_prefix32k_c64": (33024, 256, 128, 64, 0.0),
        "s_prefix4x8k_c64": (8704, 256, 128, 64, 0.0),
        "s_try_c2": (24, 4, 4, 2, 0.0),
        "s_prefix_try_c2": (48, 4, 4, 2, 0.0),
    }
    assert workloads.WORKLOADS["s_ragged_c32"].longest >= (4096 + 256) * 1.9


def test_a_workload_at_other_concurrencies():
    chosen = serve.pick_workloads("s_8k_1k_c8,s_8k_1k_c64,s_1k_128_c64", "1,64")
    figures = [(w.name, w.concurrency, w.num_prompts, w.input_len) for w in chosen]
    assert figures == [
        ("s_8k_1k_c1", 1, 8, 8192), ("s_8k_1k_c64", 64, 64, 8192),
        ("s_1k_128_c1", 1, 8, 1024), ("s_1k_128_c64", 64, 128, 1024),
    ]  # fmt: skip


def test_tokenizer_decodes_and_encodes_exactly(tmp_path: Path):
    tokenizers = pytest.importorskip("tokenizers")
    folder = workloads.write_model(tmp_path / "m", num_layers=2)
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 2
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [3, 128255, 77, 77, 4096]
    text = tokenizer.decode(ids)
    assert tokenizer.encode(text, add_special_tokens=False).ids == ids
    assert tokenizer.get_vocab_size() == workloads.VOCAB_SIZE


def client_script(folder: Path, backend: str, figures: dict = FIGURES, code: int = 0) -> str:
    """A client that waits for its gate as the real one does, and answers with fixed figures."""
    return f"""
import json, pathlib, sys, time
here = pathlib.Path({str(folder)!r})
job = json.loads((here / "job_{backend}.json").read_text())
for index, (name, arguments) in enumerate(job["commands"]):
    while int(pathlib.Path(job["gate"]).read_text()) <= index:
        time.sleep(0.02)
    file = arguments[arguments.index("--result-filename") + 1]
    figures = dict({figures!r})
    def asked(option):
        return int(arguments[arguments.index(option) + 1])
    figures["completed"] = asked("--num-prompts") - figures["failed"]
    for kind in ("input", "output"):
        total = asked("--num-prompts") * asked(f"--random-{{kind}}-len")
        figures.setdefault(f"total_{{kind}}_tokens", total)
    (here / file).write_text(json.dumps(figures))
    with open(job["status"], "a") as status:
        status.write(json.dumps({{"name": name, "code": {code}}}) + "\\n")
time.sleep(60)
"""


@pytest.fixture
def scripts(monkeypatch):
    """Replace servers and clients by scripts, looked up by backend; return what was started."""
    found: dict[str, tuple[str, str]] = {}
    started: list[tuple[str, subprocess.Popen]] = []

    def start(command, log, environ=None):
        if "--attention-backend" in command:
            backend = command[command.index("--attention-backend") + 1]
            script = found[backend][0]
        else:
            backend = re.search(r"job_(\w+)\.json", command[-1])[1]
            script = found[backend][1]
        process = subprocess.Popen(
            [sys.executable, "-c", script], stdout=log, stderr=log, start_new_session=True
        )
        started.append((backend, process))
        return process

    monkeypatch.setattr(serve_run, "_start", start)
    monkeypatch.setattr(serve_run, "healthy", lambda port: True)
    monkeypatch.setattr(serve_run, "read_counters", lambda port: {})
    found["started"] = started
    yield found
    assert all(process.poll() is not None for _, process in started), "a process was left behind"


def command(tmp_path: Path, *more: str) -> list[str]:
    return [
        "--backends", "A,B", "--workloads", "s_1k_128_c64,s_8k_1k_c8", "--runs", "2",
        "--out", str(tmp_path / "serve.json"), "--logs", str(tmp_path), "--model", str(tmp_path),
        "--start-timeout", "20", "--run-timeout", "20", *more,
    ]  # fmt: skip


def test_a_run_writes_rows_logs_and_pages(tmp_path: Path, scripts, capsys):
    pytest.importorskip("matplotlib", reason="needs matplotlib (pip install 'tilewise[bench]')")
    scripts.update({b: (SLEEP, client_script(tmp_path, b)) for b in "AB"})
    assert serve.main(command(tmp_path)) == serve.EXIT_OK
    out = capsys.readouterr().out
    assert "[8/8]" in out
    assert "left" in out
    result = json.loads((tmp_path / "serve.json").read_text())
    assert report.schema_errors(result, report.SERVE_FIELDS) == []
    order = [(row["run"], row["workload"], row["backend"]) for row in result["rows"]]
    chosen = serve.pick_workloads("s_1k_128_c64,s_8k_1k_c8")
    turns = serve_plan.turns_of(["A", "B"], chosen, 2)
    assert order == [(t.run, t.workload.name, t.backend) for t in turns]
    assert len({row["group"] for row in result["rows"]}) == 1
    assert result["rows"][0]["shape"]["concurrency"] == 64
    assert result["env"]["settings"]["at_once"] == 2
    assert (tmp_path / "server_A.log").read_text().startswith("$ ")
    assert "<title>vLLM under load: A, B</title>" in (tmp_path / "serve.html").read_text()
    assert "| s_1k_128_c64 | A | 2 of 2 |" in (tmp_path / "serve.md").read_text()


def test_json_prints_the_result_alone(tmp_path: Path, scripts, capsys):
    scripts["A"] = (SLEEP, client_script(tmp_path, "A"))
    arguments = command(tmp_path, "--json", "--backends", "A", "--runs", "1")
    assert serve.main(arguments) == serve.EXIT_OK
    captured = capsys.readouterr()
    assert len(json.loads(captured.out)["rows"]) == 2
    assert "[2/2]" in captured.err


def test_resuming_does_what_is_missing_and_what_failed(tmp_path: Path, scripts, capsys):
    scripts["A"] = (SLEEP, client_script(tmp_path, "A"))
    # B's client dies after its first workload.
    first = client_script(tmp_path, "B").replace(
        "\nfor index", "\njob['commands'] = job['commands'][:1]\nfor index"
    )
    scripts["B"] = (SLEEP, first.replace("time.sleep(60)", "raise SystemExit('gone')"))
    assert serve.main(command(tmp_path)) == serve.EXIT_FAILED
    before = json.loads((tmp_path / "serve.json").read_text())["rows"]
    assert sum(1 for row in before if row.get("error")) == 3
    assert "gone" in next(row["error"] for row in before if row.get("error"))
    capsys.readouterr()
    scripts["started"].clear()
    scripts["B"] = (SLEEP, client_script(tmp_path, "B"))
    assert serve.main(command(tmp_path, "--resume")) == serve.EXIT_OK
    assert "5 turns are done already, 3 to go" in capsys.readouterr().out
    assert {backend for backend, _ in scripts["started"]} == {"B"}
    after = json.loads((tmp_path / "serve.json").read_text())
    assert len(after["rows"]) == 8
    assert not [row for row in after["rows"] if row.get("error")]
    assert len(after["env"]["runs"]) == len({row["env"] for row in after["rows"]})
    scripts["started"].clear()
    assert serve.main(command(tmp_path, "--resume")) == serve.EXIT_OK
    assert scripts["started"] == []


def test_appended_runs_are_runs_of_their_own(tmp_path: Path, scripts):
    scripts["A"] = (SLEEP, client_script(tmp_path, "A"))
    arguments = command(tmp_path, "--append", "--backends", "A", "--runs", "1")
    for _ in range(2):
        assert serve.main(arguments) == serve.EXIT_OK
    result = json.loads((tmp_path / "serve.json").read_text())
    assert [(row["workload"], row["run"]) for row in result["rows"]] == [
        ("s_1k_128_c64", 0), ("s_8k_1k_c8", 0), ("s_1k_128_c64", 1), ("s_8k_1k_c8", 1)
    ]  # fmt: skip
    assert len(result["env"]["runs"]) == len({row["env"] for row in result["rows"]})


def test_resuming_with_other_settings_is_refused(tmp_path: Path, scripts, capsys):
    scripts.update({b: (SLEEP, client_script(tmp_path, b)) for b in "AB"})
    assert serve.main(command(tmp_path, "--runs", "1")) == serve.EXIT_OK
    again = command(tmp_path, "--resume", "--serve-args=--enforce-eager")
    assert serve.main(again) == serve.EXIT_USAGE
    assert "--serve-args '', not '--enforce-eager'" in capsys.readouterr().err
    (tmp_path / "serve.json").write_text("{}")
    assert serve.main(command(tmp_path, "--resume")) == serve.EXIT_USAGE
    assert "no result file that could be continued" in capsys.readouterr().err


def test_an_interruption_leaves_finished_rows_and_no_process(tmp_path: Path):
    """The command itself, ended by SIGTERM in its second turn."""
    slow = client_script(tmp_path, "A").replace(
        "while int", "time.sleep(index * 60)\n    while int"
    )
    driver = f"""
import subprocess, sys
from tilewise.bench import serve, serve_run, workloads
workloads.accepted_backends = lambda: ["A"]
client = {slow!r}
def start(command, log, environ=None):
    code = {SLEEP!r} if "--attention-backend" in command else client
    return subprocess.Popen([sys.executable, "-c", code], stdout=log, stderr=log,
                            start_new_session=True)
serve_run._start, serve_run.healthy = start, lambda port: True
serve_run.read_counters = lambda port: {{}}
raise SystemExit(serve.main({command(tmp_path, "--backends", "A")!r}))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", driver], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    for line in process.stdout:
        if line.startswith("[1/4]"):
            break
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 2
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    process.stdout.close()
    rows = json.loads((tmp_path / "serve.json").read_text())["rows"]
    assert [(row["workload"], row["run"], row.get("error")) for row in rows] == [
        ("s_1k_128_c64", 0, None)
    ]
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


def test_requests_that_failed_void_the_run(tmp_path: Path, scripts):
    scripts["A"] = (SLEEP, client_script(tmp_path, "A", {**FIGURES, "failed": 3}))
    assert serve.main(command(tmp_path, "--backends", "A", "--runs", "1")) == serve.EXIT_FAILED
    rows = json.loads((tmp_path / "serve.json").read_text())["rows"]
    assert [row["error"] for row in rows] == ["125 of 128 completed", "13 of 16 completed"]
    assert rows[0]["request_throughput"] == 25.8


def test_totals_other_than_asked_for_void_the_run(tmp_path: Path, scripts):
    """A server that cuts prompts or answers short would look fast."""
    scripts["A"] = (SLEEP, client_script(tmp_path, "A", {**FIGURES, "total_output_tokens": 16000}))
    assert serve.main(command(tmp_path, "--backends", "A", "--runs", "1")) == serve.EXIT_FAILED
    rows = json.loads((tmp_path / "serve.json").read_text())["rows"]
    # 128 requests of 128 tokens, and 16 of 1024.
    what = "16000 output tokens in all; the workload has 16384"
    assert [row["error"] for row in rows] == [what] * 2
    ragged = workloads.WORKLOADS["s_ragged_c32"]
    assert serve_run.wrong_totals(ragged, {"total_input_tokens": 1}) is None


def test_prefix_cache_hits_void_the_run(tmp_path: Path, scripts, monkeypatch):
    scripts["A"] = (SLEEP, client_script(tmp_path, "A"))
    seen = iter([{"prefix_cache_hits": float(n)} for n in (5, 5, 5, 21)])
    monkeypatch.setattr(serve_run, "read_counters", lambda port: next(seen))
    assert serve.main(command(tmp_path, "--backends", "A", "--runs", "1")) == serve.EXIT_FAILED
    first, second = json.loads((tmp_path / "serve.json").read_text())["rows"]
    assert (first["prefix_cache_hits"], "error" in first) == (0, False)
    assert second["prefix_cache_hits"] == 16
    assert "16 tokens came from the prefix cache" in second["error"]


def test_counters_are_read_from_the_servers_metrics():
    text = (
        "# TYPE vllm:prefix_cache_hits_total counter\n"
        'vllm:prefix_cache_hits_total{engine="0"} 3.0\n'
        'vllm:prefix_cache_hits_total{engine="1"} 4.0\n'
        'vllm:prefix_cache_hits_total_created{engine="1"} 9.0\n'
    )

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert serve_run.read_counters(server.server_port) == {"prefix_cache_hits": 7.0}
    finally:
        server.shutdown()
        server.server_close()
    assert serve_run.read_counters(serve.free_port()) == {}


@pytest.mark.parametrize(
    ("server", "client", "what"),
    [
        ("raise SystemExit('RuntimeError: no device')", SLEEP, "no device"),
        (SLEEP, "raise SystemExit('lost the client')", "lost the client"),
    ],
)
def test_a_server_or_client_that_dies_becomes_rows(tmp_path: Path, scripts, server, client, what):
    scripts["A"] = (server, client)
    serve_arguments = command(tmp_path, "--backends", "A", "--runs", "1")
    assert serve.main(serve_arguments) == serve.EXIT_FAILED
    rows = json.loads((tmp_path / "serve.json").read_text())["rows"]
    assert len(rows) == 2
    assert all(what in row["error"] and row["request_throughput"] is None for row in rows)


def test_the_client_waits_for_its_gate(tmp_path: Path):
    """The real client process, with vLLM's command line replaced by one that notes its words."""
    stub = tmp_path / "vllm" / "entrypoints" / "cli"
    stub.mkdir(parents=True)
    for folder in (
        tmp_path / "vllm",
        tmp_path / "vllm/entrypoints",
        stub,
        tmp_path / "vllm/benchmarks",
    ):
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").write_text("")
    (tmp_path / "vllm/benchmarks/serve.py").write_text("")
    (stub / "main.py").write_text(
        "import sys\ndef main():\n    raise SystemExit(int(sys.argv[1]))\n"
    )

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    gate, status = tmp_path / "gate", tmp_path / "status"
    gate.write_text("0")
    status.write_text("")
    job = {"port": server.server_port, "gate": str(gate), "status": str(status),
           "commands": [["a", ["0"]], ["b", ["3"]]]}  # fmt: skip
    (tmp_path / "job.json").write_text(json.dumps(job))
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])

    def open_gate(count):
        # In one step, as the command does it: the client may be reading.
        gate.with_suffix(".part").write_text(count)
        gate.with_suffix(".part").replace(gate)

    process = subprocess.Popen(
        [sys.executable, serve_client.__file__, str(tmp_path / "job.json")],
        env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        open_gate("1")
        assert process.stdout.readline() == "=== a\n"
        deadline = time.monotonic() + 30
        while not status.read_text() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert [json.loads(t) for t in status.read_text().splitlines()] == [
            {"name": "a", "code": 0}
        ]
        assert process.poll() is None
        open_gate("2")
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.stdout.close()
        server.shutdown()
        server.server_close()
    assert json.loads(status.read_text().splitlines()[1]) == {"name": "b", "code": 3}


def test_stopping_ends_the_whole_group():
    script = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True
    )
    child = int(process.stdout.readline())
    serve_run.stop_group(process, grace=1.0)
    assert process.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        if "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]:
            break
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{child}").exists()


def test_nothing_answers_on_a_free_port():
    assert not serve_client.healthy(serve.free_port(), timeout=1.0)
