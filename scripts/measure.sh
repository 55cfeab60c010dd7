#!/usr/bin/env bash
# Everything that is measured on a GPU, each part under a time limit: kernels, host cost, cold start, a soak of a million launches.
#
#     scripts/measure.sh BUNDLE FOLDER [PART ...]     parts: gpu host soak (the default), tune
#
# FOLDER receives measure.log, a JSON file per part and, with tune, kimi_k3.yaml with measured tables; tune needs the
# bundle of configs/kimi_k3_all.yaml, which has every statistics variant. The kernels are compared with the published
# ones in docs/peers. Exit status: 0 all parts ran and passed, 1 one did not, 2 misuse.
#
#     GPU_PYTHON     a python with torch (default: python3)
#     SOAK_LAUNCHES  launches of the soak (default: 1000000)
set -uo pipefail

if [[ $# -lt 2 ]]; then
    echo "usage: $0 BUNDLE FOLDER [gpu|host|soak|tune ...]" >&2
    exit 2
fi
bundle=$(realpath "$1") && mkdir -p "$2" && folder=$(realpath "$2") || exit 2
shift 2
parts=("$@")
[[ $# -eq 0 ]] && parts=(gpu host soak)
python=${GPU_PYTHON:-python3}
launches=${SOAK_LAUNCHES:-1000000}
cd "$(dirname "$0")/.." || exit 2
export PYTHONUNBUFFERED=1
failed=0

# measure NAME SECONDS ARGUMENT ...: one command with a time limit, shown and logged
measure() {
    local name=$1 limit=$2 start=$SECONDS status
    shift 2
    echo "== $name: attnres-aot $*"
    timeout --kill-after=5 "$limit" "$python" -m attnres_aot "$@"
    status=$?
    echo "== $name: status $status after $((SECONDS - start)) s"
    [[ $status -eq 0 ]] || failed=1
}

run_parts() {
    "$python" -m compileall -q attnres_aot # what installing does; a cold start without it would not be a fair one
    local part
    for part in "${parts[@]}"; do
        case $part in
            gpu)
                measure gpu 110 bench "$bundle" --part gpu --save "$folder/gpu.json" \
                    --compare docs/peers/cute_dsl_h200.json --compare docs/peers/triton_h200.json
                ;;
            host) measure host 50 bench "$bundle" --part host --part cold-start --save "$folder/host.json" ;;
            soak)
                measure soak 100 bench "$bundle" --part none --soak "$launches" --soak-seconds 60 \
                    --save "$folder/soak.json"
                ;;
            tune)
                measure tune 120 tune "$bundle" --config configs/kimi_k3.yaml --rule after --out "$folder/kimi_k3.yaml" \
                    --save "$folder/tune.json"
                ;;
            *)
                echo "no part '$part'; choose from gpu, host, soak, tune" >&2
                failed=1
                ;;
        esac
    done
    return $failed
}

run_parts 2>&1 | tee "$folder/measure.log"
