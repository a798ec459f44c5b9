#!/usr/bin/env bash
# Makes .venv-NAME with the packages of scripts/clients/requirements/NAME.txt: clients of others, whose pins fight with ours and each other's, for the
# tests that run them. Called by the Makefile: scripts/client_venv.sh NAME
#
# Never fails: where a package can't be had (no network, no build for this Python), it says so and the tests skip by that name.
# TORCH: pip arguments for torch where the packages need it, as in scripts/make_venv.sh.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

name="$1"
wanted="scripts/clients/requirements/$name.txt"
venv=".venv-$name"
cmp --silent "$wanted" "$venv/.installed" && exit 0

install() {
    "$venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check --retries 1 --timeout 20 "$@"
}

install_torch() {
    [[ -n "${TORCH:-}" ]] && grep --quiet '^torch' "$wanted" || return 0
    read -ra torch <<<"$TORCH"
    install "${torch[@]}"
}

rm -rf "$venv"
if .venv/bin/python -m venv "$venv" && install_torch && install --requirement "$wanted"; then
    cp "$wanted" "$venv/.installed"
else
    rm -rf "$venv"
    echo "the packages of $wanted could not be installed: their tests are skipped" >&2
fi
exit 0
