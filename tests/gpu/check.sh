#!/usr/bin/env bash
# Checks the package on a machine with one NVIDIA GPU, four parts of at most five minutes, and
# prints one JSON object: versions, tests, a tiny run, benchmarks, seconds. Exit code 0: all is well.
#
#     tests/gpu/check.sh [--venv FOLDER] [--jax VERSION] [--light] [--cpu]
#
#     --venv FOLDER   install into this environment, made if need be by $PYTHON (default python3);
#                     without it the python that is active, which must have the package's .[cuda,test]
#     --jax VERSION   pin jax, as 0.11.2 (with --venv)
#     --light         without grain, tensorflow-datasets and math-verify (with --venv)
#     --cpu           a rehearsal without a GPU: tiny shapes
set -euo pipefail
cd "$(dirname "$0")/../.."

venv="" jax="" light="" platform="cuda"
while [ $# -gt 0 ]; do
    case "$1" in
        --venv) venv=$2; shift 2 ;;
        --jax) jax=$2; shift 2 ;;
        --light) light=1; shift ;;
        --cpu) platform="cpu"; shift ;;
        *) sed -n '2,12p' "$0" >&2; exit 2 ;;
    esac
done
if [ -z "$venv" ] && [ -n "$jax$light" ]; then
    echo "--jax and --light need --venv FOLDER" >&2
    exit 2
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
log() { echo "[$(date +%T)] $*" >&2; }

if [ -n "$venv" ]; then
    log "installing into $venv"
    [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
    python="$venv/bin/python"
    # the package's own dependencies and the extra test's, with jax as asked for
    "$python" - "$platform" "$jax" "$light" > "$work/requirements.txt" << 'PYTHON'
import re
import sys
import tomllib

platform, jax, light = sys.argv[1:]
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
wanted = project["dependencies"] + project["optional-dependencies"]["test"]
absent = {"grain", "tensorflow-datasets", "math-verify"} if light else set()
for requirement in wanted:
    name = re.match(r"[\w.-]+", requirement)[0]
    if name not in absent | {"jax"}:
        print(requirement)
extra = "[cuda12]" if platform == "cuda" else ""
print(f"jax{extra}=={jax}" if jax else f"jax{extra}>=0.10.2")
PYTHON
    "$python" -m pip install -q -r "$work/requirements.txt"
    "$python" -m pip install -q --no-deps -e .
else
    python=$(command -v python)
fi

export JAX_PLATFORMS=$platform TOKENIZERS_PARALLELISM=false TF_CPP_MIN_LOG_LEVEL=1
if [ "$platform" = cuda ]; then
    dtype=bfloat16 tests=gpu
    # Qwen2.5-0.5B's width with half its layers, for a GPU of 16 GiB
    model="--layers 12 --hidden 896 --intermediate 4864 --heads 14 --kv_heads 2 --vocab 32768"
    sampler="$model --dtype bfloat16 --prompts 16 --samples 8 --slots 128 --prompt 128 --response 256"
    update="$model --dtype bfloat16 --prompts 4 --samples 8 --slots 32 --prompt 128 --response 256"
else
    dtype=float32 tests="gpu or not gpu"
    sampler="--layers 2 --hidden 64 --prompts 2 --samples 2 --prompt 8 --response 8 --vocab 64"
    update=$sampler
fi

# step NAME COMMAND...: its output to $work/NAME.out, its exit code and times to $work/NAME.step
step() {
    local name=$1 begin code=0
    shift
    log "$name: $*"
    begin=$(date +%s.%N)
    timeout 300 "$@" > "$work/$name.out" 2> "$work/$name.err" || code=$?
    [ $code = 0 ] || tail -n 30 "$work/$name.err" "$work/$name.out" >&2
    echo "$code $begin $(date +%s.%N)" > "$work/$name.step"
}

# warnings of a GPU's libraries are no failures
files="tests/test_gpu.py tests/test_attention.py"
[ "$platform" = cuda ] || files="tests/test_gpu.py"
# shellcheck disable=SC2086  # lists of words
step tests "$python" -m pytest -q -m "$tests" -W default --junitxml "$work/tests.xml" $files
# number needs no math-verify, and judges arithmetic as math does
step run "$python" -m fgrpo_jax.main --config configs/tiny_arithmetic_focal.py \
    --workdir "$work/run" --config.model.dtype="$dtype" --config.steps=5 --config.reward=number \
    --config.optim.decay_start=0 --config.optim.decay_end=0 --config.eval.every=0 \
    --config.eval.problems=32
# shellcheck disable=SC2086
step sampler "$python" -m fgrpo_jax.bench sampler --repeats 3 $sampler
# shellcheck disable=SC2086
step update "$python" -m fgrpo_jax.bench update --repeats 3 $update

"$python" - "$work" "$light" << 'PYTHON'
import importlib.metadata
import importlib.util
import json
import pathlib
import platform
import sys
import xml.etree.ElementTree

import jax

work, light = pathlib.Path(sys.argv[1]), bool(sys.argv[2])
out, right = {"python": platform.python_version(), "versions": {}}, True
for name in "jax jaxlib jax-cuda12-plugin flax optax orbax-checkpoint numpy".split():
    try:
        out["versions"][name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        out["versions"][name] = None
out["absent"] = [
    name
    for name in ("grain", "tensorflow_datasets", "math_verify")
    if importlib.util.find_spec(name) is None
]
device = jax.devices()[0]
out["device"] = {"kind": device.device_kind, "platform": device.platform, "count": jax.device_count()}
for name in ("tests", "run", "sampler", "update"):
    code, begin, end = (work / f"{name}.step").read_text().split()
    out[name] = {"exit_code": int(code), "seconds": round(float(end) - float(begin), 1)}
    right &= code == "0"
if (work / "tests.xml").exists():
    suite = xml.etree.ElementTree.parse(work / "tests.xml").getroot().find("testsuite")
    count = {key: int(suite.get(key)) for key in ("tests", "failures", "errors", "skipped")}
    count["passed"] = count["tests"] - count["failures"] - count["errors"] - count["skipped"]
    out["tests"] |= count
    right &= count["passed"] > 0 and (device.platform == "cpu" or count["skipped"] == 0)
if (work / "run/metrics.jsonl").exists():
    records = [json.loads(x) for x in (work / "run/metrics.jsonl").read_text().splitlines()]
    records = records or [{}]
    keys = "loss grad_norm drift_mean drift_max tokens_per_s".split()
    out["run"] |= {"steps": len(records), "last": {key: records[-1].get(key) for key in keys}}
    right &= len(records) == 5 and all(record.get("drift_mean", 1) < 0.1 for record in records)
for name in ("sampler", "update"):
    text = (work / f"{name}.out").read_text()
    if text.startswith("{"):
        out[name] |= json.loads(text)
if light:
    right &= len(out["absent"]) == 3
out["seconds"] = round(sum(out[name]["seconds"] for name in ("tests", "run", "sampler", "update")), 1)
out["right"] = right
print(json.dumps(out, indent=1))
sys.exit(0 if right else 1)
PYTHON
