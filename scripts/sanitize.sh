#!/usr/bin/env bash
# Every image of a bundle under compute-sanitizer: memcheck, initcheck, racecheck and synccheck, side by side.
#
#     scripts/sanitize.sh BUNDLE [ROWS]           ROWS such as 1,3 (the default)
#
# Only this package's kernels are watched. Two more runs with planted defects prove that they are. Exit status: 0 all
# clean, 1 something was found or a run failed, 2 misuse. Logs stay in SANITIZE_LOGS.
#
#     COMPUTE_SANITIZER  the tool (default: compute-sanitizer on PATH)
#     GPU_PYTHON         a python with torch (default: python3)
#     SANITIZE_SECONDS   time limit of one run (default: 300)
#     SANITIZE_LOGS      folder for logs (default: a new one under /tmp)
set -uo pipefail

if [[ $# -lt 1 || $# -gt 2 ]]; then
    echo "usage: $0 BUNDLE [ROWS]" >&2
    exit 2
fi
bundle=$1 rows=${2:-1,3}
tool=${COMPUTE_SANITIZER:-compute-sanitizer}
python=${GPU_PYTHON:-python3}
limit=${SANITIZE_SECONDS:-300}
logs=${SANITIZE_LOGS:-$(mktemp -d /tmp/sanitize.XXXXXX)}
program=$(dirname "$0")/sanitize_launches.py
found=86 # the status with which the tool reports that it found something
port=49152

if ! command -v "$tool" >/dev/null; then
    echo "no $tool: it comes with the CUDA toolkit; name it in COMPUTE_SANITIZER" >&2
    exit 2
fi
mkdir -p "$logs"

# watch NAME CHECK [OPTION ...] -- ARGUMENT ...: one run in the background, with a log NAME.log and a status NAME.status
watch() {
    local name=$1 check=$2 options=()
    shift 2
    while [[ $1 != -- ]]; do options+=("$1") && shift; done
    shift
    port=$((port + 16)) # runs at the same time must not talk to each other
    (
        start=$SECONDS
        timeout --kill-after=5 "$limit" "$tool" --tool "$check" --kernel-name kns=attnres_ --error-exitcode $found \
            --print-limit 20 --show-backtrace device --port $port --log-file "$logs/$name.log" "${options[@]}" \
            "$python" "$program" "$bundle" "$@" >"$logs/$name.out" 2>&1
        echo "$? $((SECONDS - start))" >"$logs/$name.status"
    ) &
}

# judge NAME STATUS SUMMARY: prints a line about a run; false unless its status and the log's summary are as wanted
judge() {
    local name=$1 wanted=$2 pattern=$3 status seconds summary
    read -r status seconds <"$logs/$name.status"
    summary=$(grep -E 'SUMMARY' "$logs/$name.log" 2>/dev/null | tail -1)
    if [[ $status == "$wanted" && $summary =~ $pattern ]]; then
        printf 'ok      %-20s %4s s  %s\n' "$name" "$seconds" "${summary#========= }"
        return 0
    fi
    printf 'FAILED  %-20s %4s s  status %s (%s wanted), %s\n' "$name" "$seconds" "$status" "$wanted" \
        "${summary:-no summary}"
    head -40 "$logs/$name.log" 2>/dev/null
    tail -15 "$logs/$name.out"
    return 1
}

watch memcheck memcheck --report-api-errors no -- --rows "$rows"
watch initcheck initcheck -- --rows "$rows"
watch synccheck synccheck -- --rows "$rows"
watch racecheck racecheck -- --rows "$rows"
watch memcheck-planted memcheck --report-api-errors no -- --plant freed
watch initcheck-planted initcheck -- --plant unwritten
wait

failed=0
for name in memcheck initcheck synccheck; do
    judge $name 0 'ERROR SUMMARY: 0 errors' || failed=1
done
judge racecheck 0 'RACECHECK SUMMARY: 0 hazards' || failed=1
judge memcheck-planted $found 'ERROR SUMMARY: [1-9]' || failed=1
judge initcheck-planted $found 'ERROR SUMMARY: [1-9]' || failed=1
echo "logs: $logs"
exit $failed
