#!/usr/bin/env bash
# Builds what a machine installs that has no checkout: the wheel, the sdist and uv's overrides.
# Usage: scripts/wheel.sh [DIRECTORY]; `make wheel` calls it, for dist/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$(realpath -m "${1:-dist}")
log=.venv/wheel.log

. scripts/packages.sh

if [ "$installer" != uv ]; then
  say "Building takes uv, which is not in .venv: .venv/bin/python -m pip install uv"
  exit 1
fi
declare -a uv
set_uv
: >"$log"
.venv/bin/python scripts/docs/man.py out/man
if ! "${uv[@]}" build --quiet --no-create-gitignore --out-dir "$out" . >>"$log" 2>&1; then
  tail -n 15 "$log" >&2
  exit 1
fi
cp scripts/overrides.txt "$out/overrides.txt"
ls -l "$out" | awk 'NF > 8 { printf "%8d kB  %s\n", $5 / 1000, $9 }'
say "To install: uv tool install --overrides overrides.txt './FILE.whl[torch]'"
