"""What is installed: wheel, sdist, editable install in clean environments; the name guards."""

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("build")
if int(version("setuptools").split(".")[0]) < 77:
    pytest.skip("needs setuptools 77 to build", allow_module_level=True)

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {
    "": "plugin", "kernels": "kernels", "integration": "integration", "bench": "bench",
    "bench.ladder": "bench/ladder",
}  # fmt: skip
FILES = ("pyproject.toml", "README.md", "LICENSE")


def call(*command, cwd, **environ):
    """Run a command without our own folders on its path; return what it printed."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**env, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **environ},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def copy_checkout(target: Path) -> Path:
    """Copy what goes into a distribution, and a test folder that must not."""
    for name in FILES:
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    for name in (*FOLDERS.values(), "tests"):
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
        shutil.copytree(ROOT / name, target / name, ignore=ignore, dirs_exist_ok=True)
    return target


def make_env(folder: Path) -> Path:
    """Make an empty virtual environment; return its Python."""
    call(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    return folder / "bin" / "python"


def pip_install(python: Path, *what, cwd: Path) -> None:
    # The build backend comes from the environment of the tests: nothing is fetched.
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
    backend = sysconfig.get_path("purelib")
    call(*pip, "--no-deps", "--no-build-isolation", *what, cwd=cwd, PYTHONPATH=backend)


@pytest.fixture(scope="module")
def dists(tmp_path_factory):
    """Wheel and sdist of the checkout, and the wheel of that sdist."""
    work = tmp_path_factory.mktemp("dists")
    source = copy_checkout(work / "source")
    build = (sys.executable, "-m", "build", "--no-isolation")
    call(*build, "--wheel", "--outdir", work / "direct", source, cwd=work)
    call(*build, "--sdist", "--outdir", work, source, cwd=work)
    (sdist,) = work.glob("*.tar.gz")
    # Python 3.11.3 and earlier know no filters.
    filters = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(sdist) as archive:
        archive.extractall(work / "unpacked", **filters)
    (unpacked,) = (work / "unpacked").iterdir()
    call(*build, "--wheel", "--outdir", work / "via_sdist", unpacked, cwd=work)
    (direct,) = (work / "direct").glob("*.whl")
    (via_sdist,) = (work / "via_sdist").glob("*.whl")
    return direct, via_sdist


@pytest.fixture(scope="module")
def wheel_env(dists, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    python = make_env(folder / "env")
    pip_install(python, dists[0], cwd=folder)
    return python


def modules_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_wheel_holds_every_file_of_the_folders_and_nothing_else(dists):
    expected = {"tilewise/py.typed", "tilewise/tuned.json", "tilewise/bench/page.html"}
    for package, folder in FOLDERS.items():
        prefix = "tilewise/" + (f"{package.replace('.', '/')}/" if package else "")
        expected |= {prefix + path.name for path in (ROOT / folder).glob("*.py")}
    assert modules_of(dists[0]) == expected


def test_wheel_by_way_of_the_sdist_is_the_same(dists):
    assert modules_of(dists[1]) == modules_of(dists[0])


def test_folders_are_flat():
    """A package below a folder would work in an editable install and be missing from the wheel."""
    named = {ROOT / folder for folder in FOLDERS.values()}
    for folder in FOLDERS.values():
        nested = {path.parent for path in (ROOT / folder).glob("*/**/*.py")} - named
        assert not nested, nested


def test_metadata(dists):
    with zipfile.ZipFile(dists[0]) as archive:
        (metadata,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        (points,) = [n for n in archive.namelist() if n.endswith("entry_points.txt")]
        text, entry_points = archive.read(metadata).decode(), archive.read(points).decode()
        assert any(n.endswith("licenses/LICENSE") for n in archive.namelist())
    assert "[vllm.general_plugins]\ntilewise = tilewise:register" in entry_points
    assert "[console_scripts]\ntilewise = tilewise.cli:main" in entry_points
    assert "License-Expression: Apache-2.0" in text
    required = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", text, re.M)
    # vLLM is an extra: a plug-in must not replace the engine that is installed.
    assert set(required) == {"torch", "triton", "numpy", "prometheus-client"}
    assert re.search(r'^Requires-Dist: vllm<0.34,>=0.32; extra == "vllm"$', text, re.M)


IMPORTS_LITTLE = """
import sys, tilewise
heavy = {"torch", "triton", "vllm", "numpy"} & set(sys.modules)
assert not heavy, heavy
assert tilewise.__all__ == sorted(tilewise.__all__)
assert set(tilewise.__all__) <= set(dir(tilewise))
print(tilewise.__file__)
"""


def test_the_wheel_works_in_a_clean_environment(wheel_env, tmp_path):
    where = call(wheel_env, "-c", IMPORTS_LITTLE, cwd=tmp_path).strip()
    assert Path(where).is_relative_to(wheel_env.parent.parent)
    script = wheel_env.parent / "tilewise"
    assert call(script, "--version", cwd=tmp_path).strip() == "tilewise " + version("tilewise")
    assert "bench" in call(script, "--help", cwd=tmp_path)
    registered = "import tilewise; tilewise.register(); tilewise.register()"
    call(wheel_env, "-c", registered, cwd=tmp_path)


ATTENTION = """
import torch, tilewise
print(tilewise.__file__)
attention = tilewise.PagedAttention(
    2, 1, 16, page_size=16, dtype=torch.float32, max_num_reqs=1, max_num_tokens=3, device="cpu"
)
lengths = torch.tensor([3], dtype=torch.int32)
start = torch.tensor([0, 3], dtype=torch.int32)
table = torch.zeros(1, 1, dtype=torch.int32)
attention.plan(start, lengths, table, num_tokens=3, max_query_len=3)
cache = torch.ones(1, 1, 16, 32)
out = attention.run(torch.randn(3, 2, 16), cache)
torch.testing.assert_close(out, torch.ones(3, 2, 16))
"""


def test_the_kernels_run_from_the_wheel(wheel_env, tmp_path):
    """torch and Triton come from the environment of the tests, tilewise from the wheel."""
    libraries = os.pathsep.join(
        path for path in sys.path if path.endswith("-packages") and Path(path).is_dir()
    )
    if any((Path(path) / "tilewise").is_dir() for path in libraries.split(os.pathsep)):
        pytest.skip("this environment holds a copy of tilewise, which would be found first")
    environ = {"PYTHONPATH": libraries, "TRITON_INTERPRET": "1"}
    where = call(wheel_env, "-c", ATTENTION, cwd=tmp_path, **environ)
    assert Path(where.strip()).is_relative_to(wheel_env.parent.parent)
    # bench/ is part of it.
    script = wheel_env.parent / "tilewise"
    assert "pf_1x16k" in call(script, "bench", "kernels", "--list", cwd=tmp_path, **environ)


def test_editable_install_sees_edits_and_new_files(tmp_path):
    source = copy_checkout(tmp_path / "source")
    python = make_env(tmp_path / "env")
    pip_install(python, "-e", source, cwd=tmp_path)
    where = call(python, "-c", IMPORTS_LITTLE, cwd=tmp_path).strip()
    assert Path(where) == source / "plugin" / "__init__.py"
    for package, folder in FOLDERS.items():
        (source / folder / "brand_new.py").write_text("WHERE = __name__\n")
        name = ".".join(filter(None, ("tilewise", package, "brand_new")))
        seen = call(python, "-c", f"import {name} as m; print(m.WHERE)", cwd=tmp_path)
        assert seen == name + "\n"


def test_cpu_platform_is_a_distribution_of_its_own(tmp_path):
    source = tmp_path / "platform"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    shutil.copytree(ROOT / "tests" / "cpu_platform", source, ignore=ignore)
    python = make_env(tmp_path / "env")
    pip_install(python, source, cwd=tmp_path)
    asked = "import tilewise_cpu_platform as p; p.prepare_process(); print(p.platform())"
    off = {"TILEWISE_CPU_PLATFORM": "0", "TRITON_INTERPRET": "0"}
    assert call(python, "-c", asked, cwd=tmp_path, **off) == "None\n"
    named = "import tilewise_cpu_platform as p; print(p.platform())"
    on = call(python, "-c", named, cwd=tmp_path, TILEWISE_CPU_PLATFORM="1").strip()
    assert on == "tilewise_cpu_platform.platform.TilewiseCpuPlatform"


@pytest.mark.parametrize("name", ["kernels", "plugin", "integration", "bench"])
def test_a_folder_is_not_importable_by_its_bare_name(name):
    spec = find_spec(name)
    assert spec is None or ROOT not in Path(spec.origin or "/").resolve().parents
    # With the checkout on the path, as `python -c` has it, the import says what is wrong.
    attempt = f"try:\n import {name}\nexcept ImportError as error:\n print(error)"
    assert "PYTHONSAFEPATH=1" in call(sys.executable, "-c", attempt, cwd=ROOT)


def test_a_reader_that_leaves_early_gets_no_traceback():
    """As in ``tilewise bench kernels --list | head -1``."""
    command = [sys.executable, "-m", "tilewise.cli", "bench", "kernels", "--list"]
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120, check=False
        )
    finally:
        os.close(writing)
    assert done.returncode == 128 + signal.SIGPIPE
    assert done.stderr == ""
