#!/usr/bin/env bash
# Kernels under compute-sanitizer, on a machine with a CUDA device: scripts/sanitize.sh [PYTHON [steps [PART...]|exchanges]]
#
# Prompts and decode steps of a small model:
#   memcheck of eager steps  each tensor is an allocation of its own, so that whatever runs over its end is seen
#   memcheck of graphs       captured and replayed, as steps are served; there tensors share allocations
#   racecheck                hazards in shared memory, but for the kernel of large heads, whose copies into it are
#                            asynchronous; what it says of Triton's own words for groups of warps is no finding
#                            (tests/gpu/racecheck_report.py)
# Exchanges of two ranks that share the device:
#   memcheck of sums         each tensor is an allocation of its own
#   memcheck of exchanges    sums, winners and gathered logits
#   racecheck of exchanges   the same
#
# Steps are checked by part (tests/gpu/sanitized_steps.py), by default all. All checks of a program run at once, after a
# run without a checker that leaves every kernel compiled. Errors of CUDA calls are not reported: torch tries calls that
# may fail, and raises what matters.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${1:-.venv/bin/python}"
only="${2:-}"
parts=("${@:3}")
sanitizer="$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)"
if [[ ! -x "$sanitizer" ]]; then
    echo "error: compute-sanitizer, a part of the CUDA toolkit, is neither on the PATH nor in /usr/local/cuda/bin" >&2
    exit 2
fi
logs="$(mktemp -d)"
trap 'rm -rf "$logs"' EXIT
names=()
pids=()
failed=0

watch() {  # name, tool, program, its arguments
    local name="$1" tool="$2" program="$3"
    shift 3
    "$sanitizer" --tool "$tool" --report-api-errors no --error-exitcode 99 "$python" -m "$program" "$@" >"$logs/$name" 2>&1 &
    names+=("$name")
    pids+=($!)
}

report() {  # waits for what is being watched
    local status summary
    for i in "${!names[@]}"; do
        status=0
        wait "${pids[$i]}" || status=$?
        summary="$(grep -c 'SUMMARY: 0 ' "$logs/${names[$i]}" || true)"
        if [[ "$status" -eq 0 && "$summary" -ge 1 ]]; then
            echo "${names[$i]}: clean ($(grep 'SUMMARY' "$logs/${names[$i]}" | tail -n 1 | sed 's/^=* *//'))"
        elif [[ "$status" -eq 99 ]] && "$python" -m tests.gpu.racecheck_report "$logs/${names[$i]}"; then
            echo "${names[$i]}: clean but for Triton's words for groups of warps"
        else
            failed=1
            echo "${names[$i]}: exit status $status"
            head -n 200 "$logs/${names[$i]}"
        fi
    done
    names=()
    pids=()
}

if [[ "$only" != steps ]]; then
    program=tests.gpu.sanitized_exchanges
    "$python" -m "$program"
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 watch "memcheck of sums" memcheck "$program" --sums
    watch "memcheck of exchanges" memcheck "$program"
    watch "racecheck of exchanges" racecheck "$program"
    report
fi
if [[ "$only" != exchanges ]]; then
    program=tests.gpu.sanitized_steps
    if [[ "${#parts[@]}" -eq 0 ]]; then
        parts=(plain large-heads experts four-bit four-bit-experts four-bit-prompts gated-prompts)
    fi
    for how in "" --eager; do
        "$python" -m "$program" $how "${parts[@]}"
    done
    for part in "${parts[@]}"; do
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 watch "memcheck of eager steps, $part" memcheck "$program" --eager "$part"
        if [[ "$part" != *-prompts ]]; then
            watch "memcheck of graphs, $part" memcheck "$program" "$part"
        fi
        if [[ "$part" != large-heads ]]; then
            watch "racecheck, $part" racecheck "$program" --eager "$part"
        fi
    done
    report
fi
exit "$failed"
