#!/usr/bin/env bash
# Tests and benchmarks on a GPU machine that reaches no package index.
#
#   bench/gpu_session.sh [STEP...]        steps: unpack compare tests engines alone ranks demo
#                                         kernels serve operate
#                                         (default: unpack tests kernels)
#
# tests are those of kernels, engines those that start vLLM, alone those that measure the GPU (so does
# vLLM's sleep), ranks those that need two. What they did is in OUT as JUnit's XML, as text and, failure
# by failure, as NAME.failures: a run that is cut leaves the latter two. compare times the kernels as
# they are beside those with each patch of bench/patches: what was compiled and never measured.
#
# Everything that is not in the Python of the machine comes as one .tar.xz of a site-packages
# folder, cut into parts. Settings, by environment variable:
#   PARTS  folder with the parts, named so that p* lists them in order   (default /tmp/parts)
#   SITE   where they are unpacked; PYTHONPATH gets it                    (default /tmp/site)
#   OUT    where result files go                                         (default bench/results/h200)
#   COMMIT the commit to record, where the checkout came without its git folder
#   WORKERS   test processes side by side (half of the cores, at most 12; no xdist: 1)
#   MODEL  a converted SmolLM2 for engines and demo (tests/demo/convert.py makes one)
#   TEST_ARGS KERNEL_ARGS COMPARE_ARGS SERVE_ARGS OPERATE_ARGS   more arguments for pytest, for
#          `tilewise bench …` and for tests/abuse/operate.py (abuse, JIT monitor, cold starts,
#          roofline; in parallel)
#   TEST_TIMEOUT KERNEL_TIMEOUT SERVE_TIMEOUT OPERATE_TIMEOUT   seconds after which a step is ended
#   WORK   where operate puts models, homes and server logs, and compare its versions
#                                                                         (default /tmp/operate)
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
parts=${PARTS:-/tmp/parts} site=${SITE:-/tmp/site}
out=${OUT:-$root/bench/results/h200}
steps=${*:-unpack tests kernels}
failed=0

say() { printf '== %s (%(%T)T)\n' "$*" -1; }

unpack() {
    if [ -e "$site/.unpacked" ] || [ -e "$site/.complete" ]; then
        return 0
    fi
    if ! compgen -G "$parts/p*" >/dev/null; then
        echo "no parts in $parts: going on with the packages of this machine" >&2
        return 0
    fi
    mkdir -p "$site"
    cat "$parts"/p* | xz -dc -T0 | tar -C "$site" -xf - || return 1
    # Compiling once is cheaper than in each of the processes that import it at the same time.
    python3 -m compileall -q -j 0 "$site/vllm" "$site/transformers" >/dev/null 2>&1
    touch "$site/.unpacked"
}

use_site() {
    [ -d "$site" ] || return 0
    export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
    # A torch of the bundle looks for CUDA libraries that the machine's own torch brought.
    if [ -d "$site/torch" ]; then
        LD_LIBRARY_PATH=$(python3 - <<'PY'
import glob
import nvidia

print(":".join(d for p in nvidia.__path__ for d in glob.glob(p + "/*/lib")))
PY
        )${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
        export LD_LIBRARY_PATH
        # It also looks for a helper that a slim bundle leaves out, and never starts it here.
        local helper=$site/torch/bin/torch_shm_manager
        if [ ! -e "$helper" ]; then
            mkdir -p "$site/torch/bin"
            install -m 755 /dev/null "$helper"
        fi
    fi
}

# Runs a command with the checkout importable as tilewise, plugin entry points included.
run() { SETUP=0 "$root/tests/env.sh" run "$@"; }

step() {
    local name=$1
    shift
    say "$name"
    "$@"
    local code=$?
    say "$name: exit $code"
    [ $code = 0 ] || failed=1
}

describe() {
    run python3 - <<'PY'
import importlib.metadata as metadata

import torch
import triton

names = [e.name for e in metadata.entry_points(group="vllm.general_plugins")]
print("torch", torch.__version__, "triton", triton.__version__, torch.cuda.get_device_name())
print("general plugins:", ", ".join(names))
PY
}

# pytest NAME DIST ARG...: runs tests into OUT/NAME.xml and OUT/NAME.log, several at a time.
pytest() {
    local name=$1 dist=$2 workers=()
    shift 2
    if [ "$WORKERS" -gt 1 ] && python3 -c "import xdist" 2>/dev/null; then
        workers=(-n "$WORKERS" --dist "$dist")
    fi
    rm -f "$out/$name.failures"
    TILEWISE_TEST_FAILURES=$out/$name.failures \
        run timeout -k 20 "${TEST_TIMEOUT:-600}" python3 -m pytest -v "${workers[@]}" \
        -p no:cacheprovider --junitxml="$out/$name.xml" "$@" ${TEST_ARGS:-} >"$out/$name.log" 2>&1
    local code=$?
    grep -E "(FAILED|ERROR) tests/" "$out/$name.log" | sort -u | head -n 40
    echo "$(grep -c " PASSED" "$out/$name.log") passed; $(tail -n 1 "$out/$name.log" | cut -c 1-160)"
    return $code
}

tests() {
    pytest tests worksteal -m "gpu and not vllm"
}

# Longest first: a file is one worker's, since its tests share engines.
engines() {
    local first=(tests/test_{model_zoo,gpu_engine,vllm_features_gpu,compile_stalls}.py)
    first+=(tests/test_{encoder_models,start_up,fallback_engine,micro_batches}.py)
    local rest=()
    # Patterns are not expanded here: this script's steps run under `set -f`.
    mapfile -t rest < <(find tests -maxdepth 1 -name "test_*.py" -exec \
        grep -lE "mark\.vllm|importorskip\(.vllm" {} + |
        grep -vFf <(printf "%s\n" "${first[@]}" tests/test_several_gpus.py) | sort)
    pytest engines loadfile -m "gpu and vllm" "${first[@]}" "${rest[@]}"
}

alone() {
    WORKERS=1 pytest alone load -m "gpu and alone"
}

ranks() {
    WORKERS=1 pytest ranks load -m gpu tests/test_several_gpus.py
}

demo() {
    timeout -k 20 "${DEMO_TIMEOUT:-400}" make -s demo SETUP=0 2>&1 | tee "$out/demo.txt" | tail -n 3
}

kernels() {
    run timeout -k 20 "${KERNEL_TIMEOUT:-1500}" python3 -m tilewise.bench.kernels \
        --out "$out/kernels.json" ${COMMIT:+--commit "$COMMIT"} ${KERNEL_ARGS:-}
}

compare() {
    local patch name folder versions=("now=$root")
    for patch in $(find bench/patches -name "*.patch" | sort); do
        name=$(basename "$patch" .patch)
        folder=${WORK:-/tmp/operate}/versions/$name
        rm -rf "$folder" && mkdir -p "$folder" && cp -r plugin kernels "$folder" || return 1
        patch -s -p1 -d "$folder" <"$patch" || { echo "$patch does not apply" >&2; return 1; }
        versions+=("${name//-/_}=$folder")
    done
    run timeout -k 20 "${KERNEL_TIMEOUT:-1500}" python3 -m tilewise.bench.kernels \
        --versions "${versions[@]}" --providers fa3 --out "$out/compare.json" \
        ${COMMIT:+--commit "$COMMIT"} ${COMPARE_ARGS:-}
}

serve() {
    run timeout -k 60 "${SERVE_TIMEOUT:-1500}" python3 -m tilewise.bench.serve \
        --out "$out/serve.json" --logs "$out/serve-logs" ${COMMIT:+--commit "$COMMIT"} \
        ${SERVE_ARGS:-}
}

operate() {
    # It ends its parts itself, with time to write what they found.
    local seconds=${OPERATE_TIMEOUT:-420}
    run timeout -k 20 "$seconds" python3 tests/abuse/operate.py --out "$out" \
        --work "${WORK:-/tmp/operate}" --seconds $((seconds - 25)) \
        ${COMMIT:+--commit "$COMMIT"} ${OPERATE_ARGS:-}
    local code=$?
    tar -czf "$out/operate-logs.tgz" -C "${WORK:-/tmp/operate}" --exclude="home_*" --exclude="cache_*" \
        --exclude=model . 2>/dev/null
    return $code
}

export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$root" || exit 1
cores=$(nproc)
WORKERS=${WORKERS:-$((cores / 2 < 12 ? cores / 2 : 12))}
if [ -n "${MODEL:-}" ]; then
    export TILEWISE_SMOLLM2=$MODEL TILEWISE_DEMO_MODEL=$MODEL
fi
case " $steps " in *" unpack "*) step unpack unpack ;; esac
use_site
step describe describe
# Patterns among the arguments are for the commands, not for this shell.
set -f
for name in $steps; do
    case $name in
        unpack) ;;
        compare | tests | engines | alone | ranks | demo | kernels | serve | operate) step "$name" "$name" ;;
        *) echo "unknown step $name; see the head of $0" >&2; failed=1 ;;
    esac
done
exit $failed
