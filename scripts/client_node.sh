#!/usr/bin/env bash
# Installs the locked npm packages of tests/sdks/node there. Called by the Makefile.
#
# Never fails: where npm or a package can't be had, it says so and the tests skip by that name.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../tests/sdks/node"

cmp --silent package-lock.json node_modules/.installed && exit 0
if npm ci --no-audit --no-fund --no-update-notifier --loglevel=error --fetch-retries=1; then
    cp package-lock.json node_modules/.installed
else
    rm -rf node_modules
    echo "the packages of tests/sdks/node could not be installed: their tests are skipped" >&2
fi
exit 0
