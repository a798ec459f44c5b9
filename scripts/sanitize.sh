#!/usr/bin/env bash
# Prompts and decode steps of a small model under compute-sanitizer, on a machine with a CUDA device: scripts/sanitize.sh [PYTHON]
#
#   memcheck of eager steps  each tensor is an allocation of its own, so that whatever runs over its end is seen
#   memcheck of graphs       captured and replayed, as steps are served; there tensors share allocations
#   racecheck                hazards in shared memory, but for the kernel of large heads, whose copies into it are asynchronous
#
# All three at once, after a run without a checker that leaves every kernel compiled. Errors of CUDA calls are not reported: torch tries calls that
# may fail, and raises what matters.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${1:-.venv/bin/python}"
sanitizer="$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)"
if [[ ! -x "$sanitizer" ]]; then
    echo "error: compute-sanitizer, a part of the CUDA toolkit, is neither on the PATH nor in /usr/local/cuda/bin" >&2
    exit 2
fi
logs="$(mktemp -d)"
trap 'rm -rf "$logs"' EXIT

watch() {  # name, tool, arguments of the program
    local name="$1" tool="$2"
    shift 2
    "$sanitizer" --tool "$tool" --report-api-errors no --error-exitcode 99 "$python" -m tests.gpu.sanitized_steps "$@" >"$logs/$name" 2>&1
}

"$python" -m tests.gpu.sanitized_steps --large-heads --experts --four-bit
"$python" -m tests.gpu.sanitized_steps --eager --large-heads --experts --four-bit

names=("memcheck of eager steps" "memcheck of graphs" "racecheck")
PYTORCH_NO_CUDA_MEMORY_CACHING=1 watch "${names[0]}" memcheck --eager --large-heads --experts --four-bit &
pids=($!)
watch "${names[1]}" memcheck --large-heads --experts --four-bit &
pids+=($!)
watch "${names[2]}" racecheck --eager --experts --four-bit &
pids+=($!)

failed=0
for i in "${!names[@]}"; do
    status=0
    wait "${pids[$i]}" || status=$?
    summary="$(grep -c 'SUMMARY: 0 ' "$logs/${names[$i]}" || true)"
    if [[ "$status" -eq 0 && "$summary" -ge 1 ]]; then
        echo "${names[$i]}: clean ($(grep 'SUMMARY' "$logs/${names[$i]}" | tail -n 1 | sed 's/^=* *//'))"
    else
        failed=1
        echo "${names[$i]}: exit status $status"
        head -n 200 "$logs/${names[$i]}"
    fi
done
exit "$failed"
