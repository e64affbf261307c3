"""The parts of ``tests/abuse/operate.py`` that decide whether a run was fine, without engines."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("psutil")

ABUSE = Path(__file__).resolve().parent / "abuse"


@pytest.fixture(scope="module")
def modules():
    """The scripts, which lie beside each other."""
    before = list(sys.path)
    sys.path.insert(0, str(ABUSE))
    try:
        names = ("operate", "cold_start", "jit_monitor", "abuse_run")
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path[:] = before


# -- parts side by side ---------------------------------------------------------------------------


def run_parts(modules, tmp_path, seconds, **commands):
    """Parts by name: a line of Python, or one and the part that it waits for."""
    operate = modules["operate"]
    (tmp_path / "logs").mkdir()
    parts = []
    for name, told in commands.items():
        line, after = told if isinstance(told, tuple) else (told, "")
        parts.append(operate.Part(name, [sys.executable, "-c", line], f"{name}.json", after=after))
    operate.run_all(parts, tmp_path, seconds)
    return {part.name: part.state for part in parts}


def test_parts_end_as_they_do(modules, tmp_path, capsys):
    states = run_parts(
        modules, tmp_path, 60, good="print('fine')",
        bad=("import sys; print('what broke'); sys.exit(3)", "good"),
        never=("print('not reached')", "bad"),
    )  # fmt: skip
    assert states == {"good": "fine", "bad": "exit code 3", "never": "fine"}
    said = capsys.readouterr().out
    assert "what broke" in said
    assert (tmp_path / "logs" / "never.log").read_text() == "not reached\n"


def test_a_part_that_takes_too_long_is_ended_with_its_servers(modules, tmp_path):
    line = (
        f"import sys, subprocess; sys.path.insert(0, {str(ABUSE)!r}); "
        "from abuse_run import LIVE, end_on_sigterm; end_on_sigterm(); "
        f"p = subprocess.Popen([{sys.executable!r}, '-c', 'import time; time.sleep(300)'], "
        "start_new_session=True); LIVE.add(p.pid); "
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid)); p.wait()"
    )
    states = run_parts(modules, tmp_path, 8, slow=line, after=("print()", "slow"))
    assert states["slow"].startswith("cut after 8 s")
    assert states["after"] == "never began"
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        if Path(f"/proc/{pid}/status").read_text().split("State:")[1].split()[0] == "Z":
            break  # dead; nobody has asked for its exit code
        time.sleep(0.1)
    else:
        assert not Path(f"/proc/{pid}").exists()


def merge(folder, **results):
    """Merge results by name; the finished command and what it wrote."""
    for name, result in results.items():
        (folder / f"{name}.json").write_text(json.dumps(result))
    sources = [str(folder / f"{name}.json") for name in results]
    out = folder / "all.json"
    command = [sys.executable, str(ABUSE / "abuse.py"), "--merge", *sources, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done, json.loads(out.read_text()) if out.exists() else None


def test_results_of_two_setups_are_not_merged(tmp_path):
    one, two = ({"env": {}, "device": device, "cases": {}} for device in ("H200", "CPU"))
    done, found = merge(tmp_path, one=one, two=two)
    assert done.returncode == 1
    assert "two.json is of another setup than" in done.stderr
    assert found is None


def test_cases_are_merged_in_their_order_with_their_commits(tmp_path):
    first = {"env": {"commit": "a"}, "cases": {"killed": {"problems": []}}}
    second = {"env": {"commit": "b"}, "cases": {"load": {"problems": ["lost"]}}}
    done, found = merge(tmp_path, first=first, second=second)
    assert done.returncode == 1  # one of them had a problem
    assert list(found["cases"]) == ["load", "killed"]
    assert [case["run"]["commit"] for case in found["cases"].values()] == ["b", "a"]
    again = {"env": {"commit": "c"}, "cases": {"load": {"problems": []}}}
    done, found = merge(tmp_path, first=first, second=second, again=again)
    assert done.returncode == 0
    assert found["cases"]["load"]["run"]["commit"] == "c"


# -- cold starts ----------------------------------------------------------------------------------

LOG = """
(Worker) INFO torch.compile took 12.50 s in total
(Worker) INFO tilewise's kernels are compiled (1.5 s)
(Worker) INFO tilewise's kernels are compiled (0.7 s)
(Worker) INFO tilewise's prefill, decode and cache write agree with PyTorch on the KV cache (0.20 s)
(Worker) INFO Graph capturing finished in 3 secs, took 0.10 GiB
"""


def test_times_are_read_from_the_log(modules):
    assert modules["cold_start"].read_times(LOG) == {
        "our_compilation_s": 2.2, "our_check_s": 0.2, "torch_compile_s": 12.5, "graph_capture_s": 3,
    }  # fmt: skip


def started(name="cold", backend="TILEWISE", **changes):
    row = {
        "name": name, "backend": backend, "seconds": 60.0, "tokens": [1, 2], "exit_code": 0,
        "our_compilation_s": 2.0, "our_check_s": 0.2, "self_checks": 1,
    }  # fmt: skip
    return row | changes


def failed(name, backend="TILEWISE"):
    return {"name": name, "backend": backend, "error": "PermissionError"}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([started(), started("warm"), started(backend="FLASH_ATTN", tokens=[3, 4])], None),
        ([started(our_compilation_s=31.0)], "our kernels took 31.0 s, accepted 30"),
        ([started("warm", our_compilation_s=3.5)], "our kernels took 3.5 s, accepted 3"),
        ([started(our_compilation_s=0)], "does not say how long"),
        ([started(self_checks=0)], "nothing of a self-check"),
        ([started(), started("at_once", tokens=[1, 3])], "2 answers"),
        ([started(exit_code=-9)], "exit code -9"),
        ([failed("cold")], "did not come up"),
        ([failed("read_only"), failed("read_only", "FLASH_ATTN")], None),
        ([failed("read_only"), started("read_only", "FLASH_ATTN")], "did not come up"),
        ([failed("read_only_two_moved")], "did not come up"),
        ([failed("read_only_two_moved"), failed("read_only_cache_root", "FLASH_ATTN")], "did not"),
        ([failed("read_only_all_moved"), failed("read_only_all_moved", "FLASH_ATTN")], "did not"),
    ],
)
def test_starts_are_judged(modules, rows, said):
    problems = modules["cold_start"].judge(rows, gpu=True)
    assert len(problems) == (said is not None)
    assert said is None or said in problems[0]


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_home_can_be_made_read_only(modules, tmp_path):
    cold = modules["cold_start"]
    assert not cold.is_read_only(tmp_path)
    tmp_path.chmod(0o555)
    try:
        if not cold.is_read_only(tmp_path):
            pytest.skip("root may write anywhere here")
    finally:
        tmp_path.chmod(0o755)


# -- the JIT monitor ------------------------------------------------------------------------------

DIED = """
ERROR [core.py:1] RuntimeError: Triton kernel JIT compilation during inference: {kernel}. This \
causes a latency spike; consider extending warmup to cover this shape/config.
"""


def test_our_kernels_are_known(modules):
    found = modules["jit_monitor"].our_kernels()
    assert {"_plan_kernel", "_decode_kernel", "_prefill_kernel", "_write_kv_kernel"} <= found
    assert {"_hopper_prefill_kernel", "_hopper_decode_kernel"} <= found


def test_kernels_are_found_in_the_log(modules):
    event = modules["jit_monitor"].EVENT
    assert event.findall(DIED.format(kernel="_decode_kernel")) == ["_decode_kernel"]
    detail = "WARNING Triton kernel JIT compilation during inference: _f (constexprs={}). This"
    assert event.findall(detail) == ["_f"]
    assert not event.findall(modules["jit_monitor"].ACTIVE.format(mode="error"))


def test_servers_are_judged(modules):
    judge = modules["jit_monitor"].judge
    row = {
        "server": "ngram", "backend": "TILEWISE", "mode": "error", "active": True, "problems": [],
        "compiled_ours": {}, "compiled_others": {},
        "metrics": {"vllm:spec_decode_num_draft_tokens_total": 40.0},
    }  # fmt: skip
    assert judge(row, gpu=True) == []
    assert (
        "compiled while serving" in judge(row | {"compiled_ours": {"_decode_kernel": 1}}, True)[0]
    )
    assert "not active" in judge(row | {"active": False}, True)[0]
    assert "no token was drafted" in judge(row | {"metrics": {"x": 0.0}}, True)[0]
    served = {
        **row["metrics"],
        "tilewise_kernel_compilations_total{cached=true,phase=serving}": 2.0,
    }
    assert "is 2" in judge(row | {"metrics": served}, True)[0]
    # Ended by a kernel of vLLM's: no fault of ours, but nothing is hidden if ours are there too.
    ended = row | {"problems": ["status 500"], "compiled_others": {"_topk": 1}}
    assert judge(ended, True) == []
    assert len(judge(ended | {"compiled_ours": {"_decode_kernel": 1}}, True)) >= 1
    assert len(judge(ended | {"compiled_others": {}}, True)) == 1


def test_the_load_varies(modules):
    from aiohttp import web

    jit = modules["jit_monitor"]
    seen = []

    async def answer(request):
        body = await request.json()
        seen.append(body)
        return web.json_response({})

    async def whole():
        app = web.Application(client_max_size=2**24)
        app.router.add_post("/v1/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        try:
            return await jit.Client(
                f"http://127.0.0.1:{port}", jit.Load(2000, 4, 16, 0.1, 20), seed=1
            ).run()
        finally:
            await runner.cleanup()

    sent = asyncio.run(whole())
    assert sent.problems == []
    assert sent.requests == len(seen) > 150
    assert (sent.shortest, sent.longest) == (1, 2000)
    assert sent.largest_batch == 20  # more than a batch holds
    assert set(sent.rounds) == {"singles", "batches", "mixed", "prefixes", "drafted"}
    assert {len(body["prompt"]) for body in seen} >= {15, 16, 17, 63, 64, 65, 1023, 1024, 1025}
    long = [tuple(body["prompt"][:64]) for body in seen if len(body["prompt"]) >= 64]
    assert len(set(long)) < len(long)  # prefix hits


# -- the docs -------------------------------------------------------------------------------------


def test_the_docs_show_the_published_figures():
    command = [sys.executable, str(ABUSE / "operate_page.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"run {ABUSE.name}/operate_page.py\n{done.stdout}"


def test_the_docs_hide_no_failure(modules, tmp_path):
    page = importlib.import_module("operate_page")
    folder = tmp_path / page.RESULTS
    folder.mkdir(parents=True)
    env = {"gpu": "H200", "cpus": 16, "date": "2026-11-30T04:00:00+00:00", "commit": "c" * 40}
    rows = [started(), failed("read_only"), {**failed("at_once"), "skipped": "no"}]
    result = {"env": env, "rows": rows, "problems": ["cold TILEWISE: exit code 3"]}
    (folder / "cold_start.json").write_text(json.dumps(result))
    table = page.start_table(tmp_path)
    assert "| empty caches | TILEWISE | 60 | 2.0 |" in table
    assert "| a home that cannot be written | TILEWISE | did not come up |" in table
    assert "not tried: no" in table
    assert "**failed**: cold TILEWISE: exit code 3" in table
    assert "commit cccccccccccc" in table
    row = {
        "server": "plain", "backend": "TILEWISE", "mode": "error", "requests": 9, "shortest": 1,
        "longest": 32768, "largest_batch": 320, "problems": [], "compiled_ours": {},
        "compiled_others": {},
    }  # fmt: skip
    broken = {"compiled_ours": {"_decode_kernel": 2}, "compiled_others": {"_topk": 1}}
    rows = [row | {"server": "fp8"} | broken, row, row | {"server": "ngram", "problems": ["503"]}]
    (folder / "jit_monitor.json").write_text(json.dumps({"env": env, "rows": rows}))
    lines = page.jit_table(tmp_path).splitlines()
    assert "| 9 | 1 to 32768 | 320 | nothing |" in lines[2]
    assert "**failed**: 503" in lines[3]
    assert "ours: `_decode_kernel`; vLLM's: `_topk`" in lines[4]
