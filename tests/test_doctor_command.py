"""`tilewise doctor` of a machine: what prevents it from serving, the report, and how it exits."""

import importlib
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_doctor import LLAMA

from tilewise import settings
from tilewise.integration import compat, doctor
from tilewise.integration import doctor_checks as checks
from tilewise.integration.doctor_model import LayerKind

DOCS = Path(__file__).resolve().parent.parent / "docs" / "doctor.md"


# -- the machine ----------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch):
    """tilewise declared as an installed package would."""
    # vLLM asks the real entry points which platform it runs on, when somebody first wants to know.
    _ = pytest.importorskip("vllm.platforms").current_platform
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
        "128 x 128", "why the Gluon prefill leaves them", "window 128 (accepted: none, or 1024",
    ):  # fmt: skip
        assert text in out
    doctor.main([write(tmp_path, LLAMA), "--arch", "sm_80"])
    out = capsys.readouterr().out
    assert "Tiles (rows x keys) on sm_80" in out
    assert "128 x 64" in out
    assert "hopper_prefill" not in out
    assert "why the Gluon prefill" not in out
    doctor.main([write(tmp_path, LLAMA)])
    assert "why the Gluon prefill" not in capsys.readouterr().out
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
    assert "Exit codes: 0; 1 if something is fatal; 2 for a wrong command line." in helped.stdout
