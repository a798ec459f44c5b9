#!/usr/bin/env bash
# Makes .venv-aiperf: NVIDIA's benchmark client in an environment of its own, for tests/frameworks/test_aiperf.py. Called by the Makefile.
#
# Never fails: where the package can't be had (no network, no build for this Python), it says so and the test skips by that name.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=0.13.0  # the tested one: what a client sends changes from version to version
done=".venv-aiperf/.installed-$version"
[[ -e "$done" ]] && exit 0

rm -rf .venv-aiperf
if .venv/bin/python -m venv .venv-aiperf &&
    .venv-aiperf/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --retries 1 --timeout 20 "aiperf==$version"; then
    touch "$done"
else
    rm -rf .venv-aiperf
    echo "aiperf $version could not be installed: its test is skipped" >&2
fi
exit 0
