#!/usr/bin/env bash
# Makes .venv, or brings it up to date with pyproject.toml. Called by the Makefile: scripts/make_venv.sh [EXTRA]
#
# .venv/.installing stands while pip works. Found at the start, it means that an earlier call died half-way: a package may then be
# half-copied although pip calls it installed, so the .venv is rebuilt from nothing.
#
# TORCH: pip arguments for torch. Default without an NVIDIA driver: one fixed version, which a local or mirrored index can hold as a
# CPU build; a range would let pip prefer a newer CUDA build of several GB. Examples:
#   make install TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
#   make install TORCH="torch>=2.11,<2.14"
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extra="${1:-}"
busy=.venv/.installing

suits() {  # runs the candidate: a name on the PATH may be a shim of a version manager with nothing behind it
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' >/dev/null 2>&1
}

find_python() {
    local candidate
    if [[ -n "${PYTHON:-}" ]]; then
        suits "$PYTHON" && { echo "$PYTHON"; return; }
        echo "error: PYTHON=$PYTHON is not a working Python 3.11 to 3.14 with venv and ensurepip" >&2
        return 1
    fi
    for candidate in python3 python3.13 python3.12 python3.14 python3.11; do
        suits "$candidate" && { echo "$candidate"; return; }
    done
    echo "error: agentspec needs Python 3.11 to 3.14 with venv and ensurepip (on Debian: apt install python3-venv);" >&2
    echo "       none of python3, python3.11 to python3.14 on the PATH is one. Name yours with PYTHON=/path/to/python" >&2
    return 1
}

if [[ -e "$busy" ]] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    python="$(find_python)"
    "$python" -m venv --clear .venv
fi

rm -f .venv/.installed .venv/.dev-installed
touch "$busy"

if ! .venv/bin/python -c 'import importlib.metadata as m; m.version("torch")' >/dev/null 2>&1; then
    default="torch==2.13.0"
    command -v nvidia-smi >/dev/null && default="torch>=2.11,<2.14"
    read -ra torch <<<"${TORCH:-$default}"
    .venv/bin/python -m pip install "${torch[@]}"
fi
.venv/bin/python -m pip install -e ".${extra:+[$extra]}"

rm -f "$busy"
touch .venv/.installed
if [[ "$extra" == dev ]]; then touch .venv/.dev-installed; fi
