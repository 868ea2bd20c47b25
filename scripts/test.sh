#!/usr/bin/env bash
# All tests but the slow ones, in two processes side by side: those that start processes and wait
# for them, and all others. The first writes to out/tests/integration.log, which is shown at the end.
set -uo pipefail
set -m # else what runs beside, and every node that it starts, would ignore SIGINT
cd "$(dirname "${BASH_SOURCE[0]}")/.."

others=()
for folder in tests/*/; do
  [[ $folder == tests/integration/ || $folder == *__pycache__/ ]] || others+=("$folder")
done
pytest=(.venv/bin/python -m pytest -q -m "not slow" --durations=25)
mkdir -p out/tests
"${pytest[@]}" tests/integration > out/tests/integration.log 2>&1 &
integration=$!
trap 'kill -INT -- "-$integration"; wait "$integration"' EXIT

"${pytest[@]}" "${others[@]}"
status=$?
echo "tests/integration: see out/tests/integration.log until they are done"
wait "$integration" || status=$?
trap - EXIT
cat out/tests/integration.log
exit "$status"
