#!/usr/bin/env bash
# Tests with the oldest or the newest versions that pyproject.toml allows of what is installed with
# the package, in an environment of their own, build/BOUND. What only tests need is as ever.
# Usage: scripts/bounds.sh oldest|newest [PYTEST ARGUMENT...]; `make test-oldest` and `test-newest`
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bound=${1:?usage: scripts/bounds.sh oldest|newest [PYTEST ARGUMENT...]}
shift
case $bound in
  oldest) resolution=lowest-direct ;; # of what is named there; of what that needs, the newest
  newest) resolution=highest ;;
  *) echo "scripts/bounds.sh: $bound: oldest or newest" >&2; exit 2 ;;
esac
log=.venv/bounds.log
environment=build/$bound
versions=$environment/versions.txt
extras=(--extra torch --extra math --extra regex --extra schema --extra data)

. scripts/packages.sh

if [ "$installer" != uv ]; then
  say "This takes uv, which is not in .venv: .venv/bin/python -m pip install uv"
  exit 1
fi
declare -a uv
set_uv
quietly() { "${uv[@]}" "$@" >>"$log" 2>&1 || { tail -n 15 "$log" >&2; return 1; }; }
: >"$log"
quietly venv --clear --seed --python .venv/bin/python "$environment"
quietly pip compile --quiet --python "$environment/bin/python" --resolution "$resolution" \
  "${overrides[@]}" "${extras[@]}" pyproject.toml --output-file "$versions"
quietly pip install --python "$environment/bin/python" --constraint "$versions" \
  "${overrides[@]}" --editable '.[dev]'
quietly pip install --python "$environment/bin/python" --no-deps pycosat || true # see bootstrap.sh
rm -rf "$environment"/lib/python*/site-packages/trio-stubs
"$environment/bin/python" - "$versions" <<'END'
import re, sys
from pathlib import Path

pinned = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", Path("constraints.txt").read_text(), re.M))
taken = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", Path(sys.argv[1]).read_text(), re.M))
other = [f"{name} {version}" for name, version in taken.items() if pinned.get(name) != version]
print(f"not as in constraints.txt, {len(other)} of {len(taken)}: {', '.join(other)}")
END
# What is to go in a later release is no fault of this one: pyproject.toml has bounds for that. And contracts of imports
# are no test of them.
exec "$environment/bin/python" -m pytest -q -W default::DeprecationWarning -W default::FutureWarning \
  --ignore tests/architecture "$@"
