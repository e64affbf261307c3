"""`tilewise bench resources`: the arithmetic of occupancy, and the command without a GPU."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from aot_quick import COMMANDS

from tilewise import device
from tilewise.arch import ARCHITECTURES
from tilewise.bench import resources
from tilewise.bench.resources import Variant, occupancy, parser, variants


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "expected"),
    [
        # Worked out by hand from the CUDA programming guide's limits.
        (90, 128, 168, 70 * 1024, (3, "registers")),
        (90, 128, 64, 112 * 1024, (2, "shared memory")),
        (90, 128, 64, 113 * 1024, (2, "shared memory")),
        (90, 128, 64, 113 * 1024 + 1, (1, "shared memory")),
        (90, 1024, 32, 0, (2, "registers")),
        (89, 1024, 32, 0, (1, "warps")),
        (80, 32, 16, 0, (32, "programs")),
        (89, 32, 16, 0, (24, "programs")),
        (100, 256, 255, 0, (1, "registers")),
        # 33 registers are handed out as 40 a thread: 1280 a warp.
        (80, 128, 33, 0, (12, "registers")),
        (80, 128, 40, 0, (12, "registers")),
        (80, 128, 41, 0, (10, "registers")),
    ],
)
def test_programs_that_share_an_sm(arch, threads, registers, shared, expected):
    assert occupancy(arch, threads, registers, shared) == expected


def asked(*words):
    return list(variants(parser().parse_args(words)))


def test_variants():
    # The Gluon decode serves one of the two head sizes, and two Gluon prefills an fp8 cache.
    assert len(asked()) == 2 * (len(resources.KERNELS) - 2) - 1
    assert asked("--kernel", "plan", "--arch", "sm_80", "9.0", "--head-size", "64") == [
        Variant("plan", 80, "bf16", 64, 64), Variant("plan", 90, "bf16", 64, 64),
    ]  # fmt: skip
    # The Gluon kernel exists for Hopper and some sizes only.
    gluon = ("--kernel", "hopper_prefill")
    assert asked(*gluon, "--arch", "sm_80", "sm_90", "--head-size", "32", "96", "128") == [
        Variant("hopper_prefill", 90, "bf16", 96, 64),
        Variant("hopper_prefill", 90, "bf16", 128, 64),
    ]
    assert asked(*gluon, "--kv-cache-dtype", "fp8") == []
    assert asked(*gluon, "--features", "softcap") != []
    assert asked(*gluon, "--features", "alibi") == []
    kv8 = ("--kernel", "hopper_prefill_kv8", "--head-size", "256", "--kv-cache-dtype")
    assert asked(*kv8, "fp8_e5m2") == [Variant("hopper_prefill_kv8", 90, "bf16", 256, 64)]
    assert asked(*kv8, "auto") == []
    assert asked(*gluon, "--heads", "128/1") == []
    assert asked(*gluon, "--dtype", "fp32") == []
    fp8 = ("--kernel", "hopper_prefill_fp8", "--kv-cache-dtype")
    assert asked(*fp8, "fp8") == [Variant("hopper_prefill_fp8", 90, "bf16", 128, 64)]
    assert asked(*fp8, "fp8_e5m2") == asked(*fp8, "auto") == []
    assert asked(*fp8, "fp8", "--arch", "sm_100") == []
    shared = ("--kernel", "prefix_decode", "--head-size", "128", "512")
    assert asked(*shared) == [Variant("prefix_decode", 90, "bf16", 128, 64)]
    assert asked(*shared, "--window", "4096") == []
    # Nor where the policy leaves the layer to the plain kernel.
    assert asked(*gluon, "--kv-cache-dtype", "fp8") == []
    assert asked(*gluon, "--page-size", "16") == []
    assert asked(*gluon, "--window", "128") == []
    assert len(asked(*gluon, "--features", "sinks", "--window", "1100")) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--arch", "sm_75"], "accepted: sm_80, sm_89, sm_90, sm_100"),
        (["--heads", "8"], "accepted: query heads / KV heads"),
        (["--heads", "9/2"], "accepted: query heads / KV heads"),
        (["--kernel", "softmax"], "invalid choice"),
        (["--head-size", "-1"], "accepted: a whole number"),
        (["--kv-cache-dtype", "nvfp4"], "invalid choice"),
    ],
)
def test_wrong_usage(words, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        resources.main(words)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_no_such_variant_and_the_interpreter_are_wrong_usage(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert resources.main([]) == 2
    assert "unset TRITON_INTERPRET" in capsys.readouterr().err
    monkeypatch.delenv("TRITON_INTERPRET")
    assert resources.main(["--kernel", "hopper_prefill", "--arch", "sm_80"]) == 2
    assert "no such variant" in capsys.readouterr().err


@pytest.fixture
def run(compiled):
    """The command in a process of its own, from the cache where its sources are as they were."""
    return lambda *words: SimpleNamespace(**compiled("command", [words])[0])


def test_the_command_compiles(run):
    done = run(*COMMANDS[0])
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["schema"] == 1
    assert report["heads"] == [32, 8]
    rows = report["variants"]
    assert [(r["kernel"], r["arch"]) for r in rows] == [("decode", 80), ("decode", 90)]
    for r in rows:
        assert r["threads"] == 128
        assert 16 <= r["registers"] <= 255
        taken = (r["arch"], r["threads"], r["registers"], r["shared_bytes"])
        assert (r["programs_per_sm"], r["limited_by"]) == occupancy(*taken)
    # Only Hopper has the copy engine.
    assert [r["tma"] > 0 for r in rows] == [False, True]


@pytest.mark.slow
def test_the_gluon_kernel_over_an_fp8_cache(run):
    done = run(
        "--kernel", "hopper_prefill_kv8", "--kv-cache-dtype", "fp8_e5m2", "--head-size", "96",
        "--features", "softcap", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["variants"]
    assert row["features"] == "softcap+e5m2"
    assert row["threads"] == 384
    assert row["wgmma"] > 0


@pytest.mark.slow
def test_the_gluon_kernel_with_what_layers_ask_of_it(run):
    done = run(
        "--kernel", "hopper_prefill", "prefill", "--head-size", "64", "--window", "1100",
        "--features", "sinks", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    gluon, plain = json.loads(done.stdout)["variants"]
    for row in (gluon, plain):
        assert row["features"] == "sinks+window=1100"
        assert row["wgmma"] > 0
    # Two consumers and the warps that load; the plain kernel is its stand-in, of as many rows.
    assert gluon["threads"] > plain["threads"] == 256
    assert gluon["shared_bytes"] <= 227 * 1024


@pytest.mark.slow
def test_fp8_caches(run):
    done = run(
        "--kv-cache-dtype", "fp8", "--arch", "sm_80", "sm_89", "sm_90", "--head-size", "128",
        "--kernel", "decode", "cache_write", "plan", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["variants"]
    # GPUs before sm_89 have no instruction for it, and on that one Triton would round twice.
    assert [(r["kernel"], r["arch"], r["features"]) for r in rows] == [
        ("decode", 80, "e4m3_bits"), ("cache_write", 80, "e4m3_bits"), ("plan", 80, ""),
        ("decode", 89, "e4m3"), ("cache_write", 89, "e4m3_bits"), ("plan", 89, ""),
        ("decode", 90, "e4m3"), ("cache_write", 90, "e4m3"), ("plan", 90, ""),
    ]  # fmt: skip


@pytest.mark.parametrize("arch", list(ARCHITECTURES))
def test_fp8_caches_are_compiled_as_they_are_run(arch, monkeypatch):
    monkeypatch.setattr(device, "describe", lambda _: ARCHITECTURES[arch])
    chosen = device.fp8_format.__wrapped__  # past the memory of earlier answers
    gpu = torch.device("cuda", 0)
    for name, dtype in (("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)):
        for kernel in ("decode", "prefill", "cache_write"):
            expected = chosen(dtype, gpu, write=kernel == "cache_write")
            assert resources._kv_format(name, arch, kernel) == expected


@pytest.mark.slow
def test_a_table_with_features_and_what_cannot_be(run):
    words = ["--kernel", "decode", "--head-size", "64", "84", "--window", "128"]
    done = run(*words, "--features", "sinks")
    assert done.returncode == 1, done.stderr
    head, good, bad = done.stdout.splitlines()
    assert head.split()[:3] == ["kernel", "arch", "head"]
    assert "sinks+window=128" in good
    assert "head_dim=84; accepted: multiples of 8 from 16 to 256, and 512" in bad


def test_help():
    command = [sys.executable, "-m", "tilewise.cli", "bench", "resources", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "Exit codes: 0; 1 if a variant cannot be compiled; 2 for a wrong" in done.stdout
