"""`tilewise bench resources`: the arithmetic of occupancy, and the command without a GPU."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from aot_quick import COMMANDS

import tilewise.kernels
from tilewise import device, metrics_page
from tilewise.arch import ARCHITECTURES
from tilewise.bench import resources
from tilewise.bench.resources import occupancy, parser
from tilewise.bench.variants import (
    FEATURES,
    FORMS,
    KERNELS,
    MASKS,
    SPECIALISED,
    LeftOut,
    Variant,
    variants,
)


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
    return [v for v in variants(parser().parse_args(words)) if isinstance(v, Variant)]


def refused(*words):
    """Reasons by kernel."""
    found = [v for v in variants(parser().parse_args(words)) if isinstance(v, LeftOut)]
    return {one.variant.kernel: one.why for one in found}


# What a feature becomes in a kernel's signature.
ARGUMENTS = {
    "sinks": "sinks_ptr", "softcap": "cap_log2", "alibi": "slopes_ptr", "sqrt": "ALIBI_SQRT",
    "lse": "HAS_LSE", "window": "WINDOW", "flags": "causal_ptr", "bidirectional": "CAUSAL",
    "spans": "spans_ptr", "starts": "kv_start_ptr", "fp8_out": "OUT_FORMAT", "fp8_dot": "FP8_DOT",
    "rotated": "ROTATED", "invariant": "PIECE_TILES", "beside": "BESIDE", "rows": "block_table_ptr",
    "windowed": "SPANS_IN_WINDOW", "head_scales": "K_SCALE_STEP", "page_scales": "K_SCALE_STEP",
} | dict.fromkeys(MASKS, "MASK")  # fmt: skip


def signatures():
    """Names of every launched kernel's arguments, by the name that launches are counted under."""
    found = {}
    for source in Path(tilewise.kernels.__file__).parent.glob("*.py"):
        text = source.read_text()
        launched = re.findall(r" = Launcher\((\w+)\)", text)
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name in launched:
                name = {"_write_kv_kernel": "cache_write"}.get(node.name, node.name[1:-7])
                found[name] = {argument.arg for argument in node.args.args}
    return found


def test_every_kernel_that_launches_are_counted_of():
    # Which is every launcher's: tests/test_launch_counters.py.
    counted = set(re.findall(r"`(\w+)`", metrics_page.LABELS["kernel"]))
    assert set(KERNELS) == counted | {"prefix_plan"}
    assert set(signatures()) == counted
    assert {v.kernel for v in (*asked(), *asked("--kv-cache-dtype", "fp8"))} == set(KERNELS)


def test_every_feature_that_specialises_a_kernel():
    assert set(ARGUMENTS) == {*FEATURES, "window"}
    found = signatures()
    for names in found.values():
        if "cap_factor" in names:  # the Gluon kernels'
            names.add("cap_log2")
    known = {kernel: {f for f, name in ARGUMENTS.items() if name in found[kernel]}
             for kernel in found}  # fmt: skip
    # Trees are of decodes; the others read pages, and scales that no page has of its own.
    known["prefill"].remove("tree")
    for kernel in set(known) - {"prefill", "decode", "cache_write"}:
        known[kernel] -= {"rows", "page_scales"}
    others = ("prefix_plan", *FORMS)
    assert {k: v for k, v in SPECIALISED.items() if k not in others} == {
        k: v for k, v in known.items() if k not in others
    }


def test_features_are_those_that_can_be_compiled():
    done = python("from tilewise.bench.aot import FEATURES, MASKS; print(*FEATURES, *MASKS)")
    # What only benchmarks ask of the decode.
    assert set(done.stdout.split()) - set(FEATURES) == {"cuts", "clocks"}, done.stderr


def test_variants():
    # The Gluon decode serves one of the two head sizes, and two Gluon prefills an fp8 cache.
    sized = [v for v in asked() if v.kernel not in FORMS]
    assert len(sized) == 2 * (len(KERNELS) - len(FORMS) - 2) - 1
    forms = [v for v in asked("--arch", "80", "90") if v.kernel in FORMS]
    assert len(forms) == 2 * sum(map(len, FORMS.values()))
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


def test_each_feature_once():
    found = asked("--features", "each", "--head-size", "128")
    assert len(found) == len(set(found))
    for kernel in ("prefill", "decode", "hopper_prefill", "plan", "prefix_decode"):
        single = {v.features for v in found if v.kernel == kernel}
        others = {"window", "windowed", "fp8_dot", "rotated", "head_scales", "page_scales"}
        wanted = {(f,) for f in SPECIALISED[kernel] - others} | {()}
        if ("sqrt",) in wanted:
            wanted = wanted - {("sqrt",)} | {("alibi", "sqrt")}
        if ("blocks",) in wanted:
            wanted = wanted - {("blocks",)} | {("blocks", "starts")}
        assert single == wanted, kernel
    fp8 = ("--features", "each", "--kv-cache-dtype", "fp8", "--kernel", "cache_write", "prefill")
    found = {v.features for v in asked(*fp8)}
    assert {("rotated",), ("fp8_dot",), ("head_scales",), ("page_scales",)} <= found
    window = ("--features", "each", "--window", "512", "--kernel", "prefill")
    assert ("spans", "windowed") in {v.features for v in asked(*window)}


@pytest.mark.parametrize(
    ("words", "kernels", "why"),
    [
        (["alibi"], {"hopper_prefill", "hopper_decode"}, "ALiBi (accepted: none)"),
        (["fp8_out"], {"hopper_prefill", "hopper_decode"}, "outputs of fp8"),
        (["tree"], {"hopper_prefill", "hopper_decode", "prefix_plan"}, "a mask of tree"),
        (["flags"], {"hopper_prefill", "prefix_keys"}, "attention that is not causal"),
        (["starts"], {"hopper_decode", "prefix_groups"}, "keys without a block table"),
        (["spans"], {"hopper_prefill", "prefix_decode"}, "spans (accepted: none)"),
        (["invariant"], {"hopper_decode", "prefix_decode"}, "batch-invariant mode"),
        (["bits", "spans"], {"prefill", "decode", "plan", "cache_write"}, "spans with bits (acc"),
        (["bits", "--window", "99"], {"prefill", "decode"}, "bits with a window (accepted: one"),
        (["fp8_dot"], {"prefill"}, "(accepted: --kv-cache-dtype fp8)"),
        (["rotated"], {"decode", "cache_write"}, "rotated with a cache of 16 bits or more (acc"),
        (["rotated", "--head-size", "96", "--kv-cache-dtype", "fp8"], {"decode"}, "powers of two"),
        (["fp8_dot", "--kv-cache-dtype", "fp8"], {"hopper_prefill_kv8"}, "fp8_dot (accepted: wit"),
        (["softcap", "--kv-cache-dtype", "fp8"], {"hopper_prefill_fp8"}, "a soft cap (accepted: n"),
        (["beside", "invariant"], {"hopper_prefill"}, "no Gluon decode to run beside"),
        (["rows"], {"hopper_prefill", "prefix_keys"}, "keys without a block table"),
        (["rows", "--kv-cache-dtype", "fp8"], {"prefill", "decode"}, "rows with a cache of e4m3"),
        (["windowed"], {"prefill"}, "windowed without a window (accepted: --window)"),
        (["page_scales", "--kv-cache-dtype", "fp8"], {"hopper_prefill_kv8", "prefix_decode",
          "hopper_prefill_fp8"}, "page_scales (accepted: without)"),
        (["page_scales", "--kv-cache-dtype", "fp8", "--page-size", "16"], {"decode"}, "multiples "),
    ],
)  # fmt: skip
def test_what_a_kernel_does_not_have_is_left_out_with_a_reason(words, kernels, why):
    words = ["--head-size", "128", "--features", *words]
    found = refused(*words)
    assert {kernel for kernel in kernels if why in found.get(kernel, "")} == kernels
    assert not kernels.intersection(v.kernel for v in asked(*words))


def test_features_of_others_leave_a_kernel_as_it_is():
    # A plan of layers with sinks is the plan of any; decodes see nothing of spans.
    words = ("--features", "sinks", "--head-size", "128", "--kernel")
    assert [v.features for v in asked(*words, "plan", "decode")] == [(), ("sinks",)]
    spans = ("--features", "spans", "--head-size", "128", "--kernel", "plan", "decode")
    assert [v.features for v in asked(*spans)] == [("spans",), ()]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--features", "bitmap"], "invalid choice"),
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
    said = capsys.readouterr().err
    assert "no such variant" in said
    assert "left out for sm_80: hopper_prefill: compute capability 8.0 (accepted: 9.0)" in said
    assert resources.main(["--features", "each", "sinks"]) == 2
    assert "--features each sinks; accepted: each alone" in capsys.readouterr().err


def python(code):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.fixture
def run(compiled):
    """The command in a process of its own, from the cache where its sources are as they were."""
    return lambda *words: SimpleNamespace(**compiled("command", [words])[0])


def test_the_command_compiles(run):
    done = run(*COMMANDS[0])
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["schema"] == 2
    assert report["left_out"] == []
    assert report["heads"] == [32, 8]
    rows = report["variants"]
    assert [(r["kernel"], r["arch"]) for r in rows] == [("decode", 80), ("decode", 90)]
    for r in rows:
        assert r["threads"] == 128
        assert 16 <= r["registers"] <= 255
        taken = (r["arch"], r["threads"], r["registers"], r["shared_bytes"])
        assert (r["programs_per_sm"], r["limited_by"]) == occupancy(*taken)
        assert r["warps_per_sm"] == r["programs_per_sm"] * r["threads"] // 32
        assert r["occupancy_percent"] == pytest.approx(100 * r["warps_per_sm"] / 64, abs=0.05)
    # Only Hopper has the copy engine.
    assert [r["tma"] > 0 for r in rows] == [False, True]


@pytest.mark.slow
def test_small_kernels_and_what_is_left_out(run):
    done = run(
        "--kernel", *FORMS, "prefix_keys", "prefix_groups", "prefix_plan", "plan",
        "--head-size", "128", "--features", "spans", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    rows = [(r["kernel"], r["features"], r["head_size"]) for r in report["variants"]]
    forms = [(kernel, form, None) for kernel in FORMS for form in FORMS[kernel]]
    assert rows == [*forms, ("plan", "spans", 128)]
    assert all(r["spill_bytes"] == 0 for r in report["variants"])
    # Each form is a kernel of its own.
    taken = {(r["kernel"], r["registers"], r["shared_bytes"]) for r in report["variants"]}
    assert len(taken) == len(rows)
    assert [(r["kernel"], r["features"], r["why"]) for r in report["left_out"]] == [
        (kernel, "spans", "spans (accepted: none)")
        for kernel in ("prefix_keys", "prefix_groups", "prefix_plan")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_every_feature_compiles(cache, run):
    done = run("--features", "each", "--head-size", "128", "--kv-cache-dtype", cache, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [row["error"] for row in report["variants"] if row["error"]] == []
    assert [row["kernel"] for row in report["variants"] if row["unset_registers"]] == []
    shown = {(row["kernel"], row["features"]) for row in report["variants"]}
    assert len(shown) == len(report["variants"])


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
    assert re.search(r"  \d+ of 64 \([\d.]+ %\)  ", good)
    assert head.split()[:3] == ["kernel", "arch", "head"]
    assert "sinks+window=128" in good
    assert "head_dim=84; accepted: multiples of 8 from 16 to 256, and 512" in bad


def test_help():
    command = [sys.executable, "-m", "tilewise.cli", "bench", "resources", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "Exit codes: 0; 1 if a variant cannot be compiled; 2 for a wrong" in done.stdout
    assert [f for f in FEATURES if not re.search(rf"^  {f} +\w", done.stdout, re.M)] == []
