"""`tilewise doctor`: what it says of models, of the machine and of vLLM, and how it exits."""

import importlib
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tilewise import PagedAttention, policy, settings, support
from tilewise.arch import ARCHITECTURES, parse_arch
from tilewise.errors import UnsupportedConfig
from tilewise.integration import compat, doctor, doctor_model
from tilewise.integration import doctor_checks as checks
from tilewise.integration.doctor_model import LayerKind, Server, cuda_graphs, examine, ranges
from tilewise.model_config import Options, read_model
from tilewise.workspace import workspace_bytes

DOCS = Path(__file__).resolve().parent.parent / "docs" / "doctor.md"
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 32,
    "num_key_value_heads": 8, "hidden_size": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
SERVER = Server(max_num_seqs=64, max_num_batched_tokens=2048)
HOPPER = ARCHITECTURES[90]


def layers(config, **options):
    return read_model(config, Options(**options)).layers


def report(config, server=SERVER, device=HOPPER, **options):
    return examine(config, Options(**options), server, device)


# -- models ---------------------------------------------------------------------------------------


def test_a_llama_is_ours_with_the_policys_tiles():
    found = report(LLAMA)
    (kind,) = found.kinds
    assert kind.layers == (0, 1, 2, 3)
    assert (kind.num_q_heads, kind.num_kv_heads, kind.head_size) == (32, 8, 128)
    assert (kind.backend, kind.reasons, kind.features) == ("TILEWISE", (), ())
    assert kind.kernels == ("plan", "cache_write", "hopper_prefill", "hopper_decode", "decode")
    config = policy.choose(policy.Geometry(32, 8, 128, 64, 2), HOPPER)
    assert kind.hopper_prefill == vars(config.hopper_prefill)
    assert kind.why_not_hopper is None
    assert kind.prefill == vars(config.prefill)
    assert kind.decode == vars(config.decode)
    assert kind.hopper_decode == vars(config.hopper_decode)
    assert kind.few_requests == 132 // 8
    assert kind.num_workers == config.num_workers
    assert kind.workspace_bytes == workspace_bytes(config, 64, 2048)
    assert (found.cuda_graphs, found.page_size, found.arch) == ("ALWAYS", 64, "sm_90")


@pytest.mark.parametrize(
    ("extra", "options", "reason"),
    [
        ({}, {"device": ARCHITECTURES[80]}, "compute capability 8.0 (accepted: 9.0)"),
        ({"head_dim": 96}, {}, "head_dim 96 (accepted: 64, 128, 256)"),
        ({}, {"block_size": 16}, "page_size 16 (accepted: 64 and multiples of 128)"),
        ({}, {"kv_cache_dtype": "fp8"}, "1 bytes an element of the cache (accepted: 2)"),
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, {},
         "a logits soft cap or ALiBi (accepted: neither)"),
    ],
)  # fmt: skip
def test_the_plain_prefill_serves_what_the_gluon_kernel_does_not(extra, options, reason):
    for kind in report({**LLAMA, **extra}, **options).kinds:
        assert kind.backend == "TILEWISE"
        assert set(kind.kernels) - {"hopper_decode"} == {
            "plan", "cache_write", "prefill", "decode",
        }  # fmt: skip
        assert kind.hopper_decode is None or not extra
        assert kind.hopper_prefill is None
        assert kind.why_not_hopper == reason


def test_a_narrow_window_stays_with_the_plain_kernel():
    windowed = {**LLAMA, "model_type": "gpt_oss", "sliding_window": 128, "head_dim": 64}
    narrow, full = report(windowed).kinds
    assert (narrow.window, full.window) == (128, None)
    assert narrow.hopper_prefill is None
    assert narrow.why_not_hopper == "window 128 (accepted: none, or 512 and more)"
    assert full.hopper_prefill is not None


def test_an_fp8_cache_is_ours_with_the_tiles_of_its_bytes():
    for name in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        (kind,) = report(LLAMA, kv_cache_dtype=name).kinds
        config = policy.choose(policy.Geometry(32, 8, 128, 64, 2, 1), HOPPER)
        assert (kind.backend, kind.reasons) == ("TILEWISE", ())
        assert kind.prefill == vars(config.prefill)
        assert kind.decode == vars(config.decode)
        assert kind.workspace_bytes == workspace_bytes(config, 64, 2048)
    (plain,) = report(LLAMA).kinds
    assert plain.decode != kind.decode


def test_tensor_parallel_ranks_share_the_heads():
    (one, *_) = layers(LLAMA, tensor_parallel_size=16)
    assert (one.num_q_heads, one.num_kv_heads, one.request.group_size) == (2, 1, 2)
    with pytest.raises(UnsupportedConfig, match=r"32 query heads cannot be shared by 5 ranks"):
        layers(LLAMA, tensor_parallel_size=5)


@pytest.mark.parametrize(
    "model_type",
    ["gemma2", "gemma3_text", "cohere2", "gpt_oss", "qwen2", "exaone4", "olmo3", "llama4_text",
     "smollm3", "ministral"],
)  # fmt: skip
def test_windows_are_where_transformers_puts_them(model_type):
    """Its classes write each layer's kind down; from the same numbers without them, so do we."""
    transformers = pytest.importorskip("transformers")
    filled = transformers.CONFIG_MAPPING[model_type]().to_dict()
    expected = [t.partition("_")[0] for t in filled["layer_types"]]
    for config in (filled, {k: v for k, v in filled.items() if k != "layer_types"}):
        if model_type == "olmo3" and config is not filled:
            continue  # its files always list the layers
        found = layers(config)
        kinds = [
            "chunked" if layer.request.layer_kind == "ChunkedLocalAttention"
            else "sliding" if layer.window else "full"
            for layer in found
        ]  # fmt: skip
        assert kinds == expected
        assert {layer.window for layer in found} <= {None, filled.get("sliding_window")}
        assert all(layer.request.has_sliding_window == bool(layer.window) for layer in found)


FEATURES = [
    ({"model_type": "bloom", "n_layer": 2, "n_head": 16, "hidden_size": 1024}, {"alibi"}),
    ({"model_type": "mpt", "n_layers": 2, "n_heads": 16, "d_model": 2048,
      "attn_config": {"alibi": True}}, {"alibi"}),
    ({"model_type": "falcon", "num_hidden_layers": 2, "num_attention_heads": 71,
      "hidden_size": 4544, "multi_query": True, "alibi": True}, {"alibi"}),
    ({**LLAMA, "model_type": "gemma2", "sliding_window": 4096, "attn_logit_softcapping": 50.0},
     {"soft_cap", "sliding_window"}),
    ({**LLAMA, "model_type": "gpt_oss", "sliding_window": 128}, {"sinks", "sliding_window"}),
    ({**LLAMA, "model_type": "llama4_text", "attention_chunk_size": 8192}, {"chunked_local"}),
    ({**LLAMA, "model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64},
     {"mla", "other_head_size"}),
    ({"model_type": "gemma3", "text_config": {**LLAMA, "model_type": "gemma3_text"}},
     {"mm_prefix"}),
    ({**LLAMA, "model_type": "bert"}, {"attn_type"}),
    ({**LLAMA, "head_dim": 84}, {"other_head_size"}),
    ({**LLAMA, "num_attention_heads": 256, "num_key_value_heads": 1, "head_dim": 64},
     {"other_group_size"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "expected"), FEATURES,
    ids=[f"{config['model_type']}-{'-'.join(sorted(rows))}" for config, rows in FEATURES],
)  # fmt: skip
def test_features_are_seen_and_answered_by_the_support_table(config, expected):
    found = report(config)
    features = {
        row.key
        for layer in layers(config)
        for row in support.present(layer.request)
        if row.key not in {plain.key for plain in support.present(support.Request())}
    }
    assert features == expected
    for kind in found.kinds:
        refused = {reason.key for reason in kind.reasons}
        assert refused <= expected
        assert (kind.backend == "TILEWISE") == (not refused)
        if refused:
            assert kind.backend == (kind.candidates[0] if kind.candidates else None)
            assert kind.kernels == ()


def test_falcon_has_one_kv_head():
    assert {layer.num_kv_heads for layer in layers(FEATURES[2][0])} == {1}


@pytest.mark.parametrize(
    ("extra", "attention"),
    [
        ({"layer_types": ["linear_attention", "full_attention"] * 2}, (1, 3)),
        ({"layers_block_type": ["mamba", "mamba", "attention", "mlp"]}, (2,)),
        ({"hybrid_override_pattern": "M-*M"}, (2,)),
        ({"attn_layer_period": 2, "attn_layer_offset": 1}, (1, 3)),
    ],
)
def test_layers_without_attention_are_counted_apart(extra, attention):
    model = read_model({**LLAMA, **extra})
    assert tuple(layer.index for layer in model.layers) == attention
    assert model.other_layers == 4 - len(attention)


def test_options_of_the_server_change_the_answer():
    (kind,) = report(LLAMA, kv_cache_dtype="nvfp4").kinds
    assert kind.backend == "FLASHINFER"
    assert [reason.key for reason in kind.reasons] == ["kv_nvfp4"]
    (kind,) = report(LLAMA, block_size=24).kinds
    assert (kind.backend, kind.candidates) == (None, ())
    assert report(LLAMA, block_size=32).page_size == 32
    assert report({**LLAMA, "head_dim": 84}).page_size == 16
    assert report(LLAMA, dtype="half").dtype == "float16"
    assert report({**LLAMA, "torch_dtype": "float32"}).dtype == "bfloat16"
    (slow,), (fast,) = report(LLAMA).kinds, report(LLAMA, server=Server(64, 2048, 7)).kinds
    assert fast.decode["block_m"] > slow.decode["block_m"]


@pytest.mark.parametrize("config", [{}, {"num_hidden_layers": 0}, {"num_hidden_layers": 2}])
def test_a_configuration_without_a_language_model_is_refused(config):
    with pytest.raises(UnsupportedConfig, match=r"config\.json has no num_"):
        report(config)


@pytest.mark.parametrize(
    ("heads", "dtype", "reqs", "tokens", "drafts"),
    [((4, 2, 64, 64), torch.float16, 8, 256, 0), ((32, 1, 128, 16), torch.bfloat16, 3, 17, 3),
     ((5, 5, 80, 48), torch.float32, 1, 1, 0)],
)  # fmt: skip
def test_the_workspace_is_that_of_the_object(heads, dtype, reqs, tokens, drafts, device):
    attn = PagedAttention(
        *heads[:3], page_size=heads[3], dtype=dtype, max_num_reqs=reqs, max_num_tokens=tokens,
        device=device, decode_query_len=1 + drafts,
    )  # fmt: skip
    assert workspace_bytes(attn.config, reqs, tokens) == attn.workspace_bytes


def test_the_least_able_backend_decides_the_graphs():
    levels = {"A": "UNIFORM_BATCH", "B": "ALWAYS", "C": "NEVER", "D": None}.get
    assert cuda_graphs(["TILEWISE"], levels)[0] == "ALWAYS"
    assert cuda_graphs(["TILEWISE", "B"], levels) == (
        "ALWAYS", "B allows full graphs for any batch too"
    )  # fmt: skip
    assert cuda_graphs(["TILEWISE", "A", "B"], levels) == ("UNIFORM_BATCH", "A allows no more")
    assert cuda_graphs(["A", "C"], levels) == ("NEVER", "C allows no more")
    assert cuda_graphs(["A", "D"], levels)[0] == "UNKNOWN"
    assert cuda_graphs(["TILEWISE", None], levels) == (
        "UNKNOWN", "nobody computes some of the layers"
    )  # fmt: skip


@pytest.mark.vllm
def test_vllm_is_asked_for_a_backends_graphs():
    pytest.importorskip("vllm")
    assert cuda_graphs(["TILEWISE", "TRITON_ATTN"])[0] == "ALWAYS"
    assert doctor_model._level("NO_SUCH_BACKEND") is None


def test_ranges_are_short():
    assert ranges((0, 1, 2, 5)) == "0-2, 5"
    assert ranges((0, 2, 4, 6)) == "0, 2 .. 6"
    assert ranges((3,)) == "3"
    assert ranges((0, 2)) == "0, 2"
    assert ranges((0, 1, 2, 3)) == "0-3"


def test_architectures_by_name():
    assert [parse_arch(t).arch for t in ("sm_90", "90", "9.0", "SM_90a", "10.0")] == [90] * 4 + [
        100
    ]
    for text in ("sm_75", "hopper", "", "9"):
        with pytest.raises(UnsupportedConfig, match="accepted: sm_80, sm_89, sm_90, sm_100"):
            parse_arch(text)


# -- the machine ----------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch):
    """tilewise declared as an installed package would."""
    monkeypatch.setattr(metadata, "entry_points", lambda **_: (SimpleNamespace(name="tilewise"),))
    monkeypatch.setattr(compat, "_said", set())


@pytest.mark.vllm
@pytest.mark.usefixtures("installed")
def test_registration_and_what_prevents_it(monkeypatch):
    pytest.importorskip("vllm")
    assert checks.registration({}) == checks.Registration(("TILEWISE", "CUSTOM"), True, None)
    assert checks.registration({"VLLM_PLUGINS": "other,tilewise"}).why_not is None
    for allowed in ("other", ""):
        found = checks.registration({"VLLM_PLUGINS": allowed})
        assert found.names == ()
        assert f"VLLM_PLUGINS={allowed!r} leaves tilewise out" in found.why_not
    monkeypatch.setattr(metadata, "entry_points", lambda **_: ())
    assert "no installed package declares" in checks.registration({}).why_not
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.31.0")
    assert "supports vLLM 0.32 and 0.33, found 0.31.0" in checks.registration({}).why_not


@pytest.mark.vllm
@pytest.mark.usefixtures("installed")
def test_registration_repeats_what_the_log_says(monkeypatch):
    pytest.importorskip("vllm")

    def claim(name):
        compat._say_once(f"{name} is somebody else's")
        return False

    monkeypatch.setattr(compat, "_claim", claim)
    assert checks.registration({}).why_not == (
        "TILEWISE is somebody else's; CUSTOM is somebody else's"
    )


def test_without_vllm(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(checks.importlib, "import_module", missing)
    assert "vLLM cannot be imported" in checks.registration({}).why_not


def test_the_drivers_version():
    class Library:
        @staticmethod
        def cuDriverGetVersion(number):
            number._obj.value = 12080
            return 0

    assert checks.cuda_driver(lambda name: Library) == "12.8"
    Library.cuDriverGetVersion = staticmethod(lambda number: 100)
    assert checks.cuda_driver(lambda name: Library) is None

    def absent(name):
        raise OSError(name)

    assert checks.cuda_driver(absent) is None


def test_an_old_package_is_fatal(monkeypatch):
    declared = ["torch>=2.10", "triton>=3.6", "numpy; extra == 'bench'"]
    monkeypatch.setattr(metadata, "requires", lambda name: declared)
    found = {"torch": "2.9.1+cu128", "triton": "3.10.0", "vllm": None}
    assert list(checks.version_problems(found)) == [
        checks.Problem("fatal", "versions", "torch 2.9.1+cu128; accepted: 2.10 and later")
    ]
    assert not list(checks.version_problems({"torch": "2.10.0", "triton": None}))


def test_an_old_gpu_is_fatal():
    old, new = (checks.Gpu(n, c, 80, 1 << 16, 1 << 34) for n, c in (("V", (7, 0)), ("A", (8, 0))))
    (problem,) = checks.gpu_problems((old, new))
    assert problem.severity == "fatal"
    assert problem.text == "V has compute capability 7.0; accepted: 8.0 and later"


def test_settings_with_values_and_problems():
    found = checks.settings_found(
        {"TILEWISE_FALLBACK": "maybe", "TILEWISE_FALBACK": "error", "TILEWISE_SELF_CHECK": "0"}
    )
    by_name = {setting.name: setting for setting in found}
    assert by_name["TILEWISE_SELF_CHECK"] == checks.Setting("TILEWISE_SELF_CHECK", "0", "1", None)
    assert by_name["TILEWISE_ANY_VLLM"].value is None
    assert "'maybe' is not a way to fall back" in by_name["TILEWISE_FALLBACK"].problem
    assert "did you mean TILEWISE_FALLBACK?" in by_name["TILEWISE_FALBACK"].problem
    severities = {p.text: p.severity for p in checks.setting_problems(found)}
    assert severities == {
        by_name["TILEWISE_FALLBACK"].problem: "fatal",
        by_name["TILEWISE_FALBACK"].problem: "warning",
    }
    assert settings.defaults()["TILEWISE_ANY_VLLM"] == "0"


# -- the command ----------------------------------------------------------------------------------


@pytest.fixture
def healthy(monkeypatch):
    """A machine where all is well, whatever this one is."""
    ready = checks.Registration(("TILEWISE", "CUSTOM"), True, None)
    monkeypatch.setattr(checks, "registration", lambda: ready)
    monkeypatch.setattr(checks, "gpus", lambda: ())
    for name in [name for name in os.environ if name.startswith("TILEWISE_")]:
        monkeypatch.delenv(name)


def write(folder: Path, config) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.usefixtures("healthy")
def test_exit_status(tmp_path, monkeypatch, capsys):
    model = write(tmp_path, LLAMA)
    assert doctor.main([]) == 0
    assert doctor.main([model]) == 0
    assert doctor.main([model + "/config.json", "--arch", "sm_80"]) == 0
    assert "Nothing fatal." in capsys.readouterr().out
    assert doctor.main([model, "--block-size", "24"]) == 1
    assert "FATAL (model): no backend computes layers 0-3" in capsys.readouterr().out
    assert doctor.main([model, "--kv-cache-dtype", "nvfp4"]) == 0
    monkeypatch.setenv("TILEWISE_FALLBACK", "error")
    assert doctor.main([model, "--kv-cache-dtype", "fp8"]) == 0
    assert doctor.main([model, "--kv-cache-dtype", "nvfp4"]) == 1
    monkeypatch.setenv("TILEWISE_FALLBACK", "perhaps")
    assert doctor.main([]) == 1
    monkeypatch.setenv("TILEWISE_FALLBACK", "")
    unregistered = checks.Registration((), False, "because")
    monkeypatch.setattr(checks, "registration", lambda: unregistered)
    assert doctor.main([]) == 1
    assert "FATAL (registration): because" in capsys.readouterr().out


@pytest.mark.usefixtures("healthy")
def test_wrong_usage_is_two(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = write(tmp_path, LLAMA)
    for words, said in [
        (["no/such-model"], "'no/such-model' is no folder or file here"),
        ([model, "--arch", "sm_75"], "architecture 'sm_75'; accepted: sm_80"),
        ([model, "-tp", "5"], "cannot be shared by 5 ranks"),
    ]:
        assert doctor.main(words) == 2
        assert said in capsys.readouterr().err
    for text, said in (("[1]", "holds no JSON object"), ("{", "cannot read")):
        (tmp_path / "config.json").write_text(text)
        assert doctor.main([model]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        doctor.main(["--block-size", "-1"])
    assert stopped.value.code == 2


@pytest.mark.usefixtures("healthy")
@pytest.mark.parametrize("rich", [True, False])
def test_the_report_for_people(tmp_path, monkeypatch, capsys, rich):
    if rich:
        pytest.importorskip("rich")
        monkeypatch.setenv("COLUMNS", "200")
    else:

        def import_module(name, real=importlib.import_module):
            if name.startswith("rich"):
                raise ModuleNotFoundError(name)
            return real(name)

        monkeypatch.setattr(importlib, "import_module", import_module)
    config = {**LLAMA, "model_type": "gpt_oss", "sliding_window": 128, "head_dim": 64}
    assert doctor.main([write(tmp_path, config)]) == 0
    out = capsys.readouterr().out
    for text in (
        "none  torch sees no CUDA device", "TILEWISE, CUSTOM", "TILEWISE_SELF_CHECK", "0, 2",
        "sliding window (128); attention sinks", "Tiles (rows x keys) on sm_90", "hopper_prefill",
        "128 x 128",
    ):  # fmt: skip
        assert text in out
    doctor.main([write(tmp_path, LLAMA), "--arch", "sm_80"])
    out = capsys.readouterr().out
    assert "Tiles (rows x keys) on sm_80" in out
    assert "128 x 64" in out
    assert "hopper_prefill" not in out
    doctor.main([write(tmp_path, LLAMA), "--kv-cache-dtype", "nvfp4"])
    assert "kv_cache_dtype not supported (nvfp4" in capsys.readouterr().out


def documented() -> set[str]:
    """Keys that docs/doctor.md lists."""
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    return {row.split("`")[1] for row in rows}


def keys(value, prefix="") -> set[str]:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {key for item in value for key in keys(item, prefix + "[]")}
    if not isinstance(value, dict) or prefix.endswith(("prefill", "decode", "versions")):
        return {prefix}
    return {k for name, item in value.items() for k in keys(item, f"{prefix}.{name}".strip("."))}


def test_the_json_has_the_documented_keys(tmp_path, monkeypatch, capsys):
    gpu = checks.Gpu("H", (9, 0), 132, 227 << 10, 141 << 30)
    broken = checks.Registration((), False, "because")
    monkeypatch.setattr(checks, "registration", lambda: broken)
    monkeypatch.setattr(checks, "gpus", lambda: (gpu,))
    # Layers that are not ours have reasons to list.
    words = [write(tmp_path, LLAMA), "--kv-cache-dtype", "nvfp4", "--json"]
    assert doctor.main(words) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["schema"] == 1
    assert printed["ok"] is False
    assert printed["model"]["arch"] == "sm_90"
    assert keys(printed) == documented()


def test_what_others_print_stays_out_of_the_report(monkeypatch, capsys):
    def noisy():
        print("INFO: Automatically detected platform cuda.")
        return checks.Registration(("TILEWISE",), True, None)

    monkeypatch.setattr(checks, "registration", noisy)
    monkeypatch.setattr(checks, "gpus", lambda: ())
    doctor.main(["--json"])
    captured = capsys.readouterr()
    assert json.loads(captured.out)["registration"]["names"] == ["TILEWISE"]
    assert "Automatically detected" in captured.err


def test_the_fields_of_a_layer_kind_are_documented():
    for name in LayerKind.__dataclass_fields__:
        assert any(key.startswith(f"model.kinds[].{name}") for key in documented()), name


@pytest.mark.vllm
def test_the_command_itself(tmp_path):
    """In a process of its own, as a user runs it: only JSON on standard output."""
    command = [sys.executable, "-m", "tilewise.cli", "doctor", write(tmp_path, LLAMA), "--json"]
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    printed = json.loads(done.stdout)
    assert done.returncode == (0 if printed["ok"] else 1), done.stderr
    assert printed["versions"]["tilewise"] == "0.1.0"
    assert printed["model"]["kinds"][0]["backend"] == "TILEWISE"
    helped = subprocess.run([*command[:4], "--help"], env=env, capture_output=True, text=True)
    assert helped.returncode == 0
    assert "exit status: 0 nothing fatal, 1 something fatal, 2 wrong usage" in helped.stdout
