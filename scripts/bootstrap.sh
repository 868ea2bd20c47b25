#!/usr/bin/env bash
# Makes .venv with everything that this project needs, exactly as constraints.txt says.
# Usage: scripts/bootstrap.sh STAMP_FILE; `make` calls it when STAMP_FILE is missing.
#
# Environment:
#   PYTHON           the interpreter to use (default: the first of python3.11 ... python3)
#   TORCH_INDEX_URL  a package index to take torch alone from. Unset, a Linux machine without an
#                    NVIDIA driver takes PyTorch's for CPUs, if that answers: it saves gigabytes
#   INSTALLER        uv (the default, several times as fast; comes from PyPI) or pip, which is also
#                    what a machine that cannot have uv falls back to
#   All variables and files of pip itself (PIP_INDEX_URL, PIP_CERT, pip.conf) hold for both.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
stamp=${1:?usage: scripts/bootstrap.sh STAMP_FILE}
log=.venv/install.log

. scripts/packages.sh

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
    if command -v "$candidate" >/dev/null &&
      "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  say "Python 3.11 or newer is needed${PYTHON:+, and $PYTHON is not}. Install it, or name it: PYTHON=/path/to/python3.11 make"
  return 1
}

compiles() {
  local include
  include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
  echo "#include <$1>" | "${CC:-cc}" -I"$include" ${CFLAGS:-} ${CPPFLAGS:-} -fsyntax-only -x c - 2>/dev/null
}

# What the system lacks, one word each: venv, and with pip also compiler, python-headers, gmp. For it
# takes a release of libp2p's fastecdsa that is compiled; uv another one (overrides.txt).
missing_tools() {
  "$python" -c 'import ensurepip, venv' 2>/dev/null || echo venv
  if [ "$installer" = uv ]; then return; fi
  if ! compiles stddef.h; then
    echo compiler
  else
    compiles Python.h || echo python-headers
  fi
  compiles gmp.h || echo gmp
}

apt_packages() {
  local version tool
  version=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
  for tool in "$@"; do
    case $tool in
      compiler) echo gcc libc6-dev ;;
      venv) echo "$version-venv" ;;
      python-headers) echo "$version-dev" ;;
      gmp) echo libgmp-dev ;;
    esac
  done | tr '\n' ' '
}

explain_missing() {
  say "Missing on this machine: $*. Run the line for your system, then make again:"
  say "  Debian, Ubuntu:  sudo apt-get install -y gcc libgmp-dev python3-dev python3-venv"
  say "  Fedora:          sudo dnf install -y gcc gmp-devel python3-devel"
  say "  macOS:           brew install gmp && export CPPFLAGS=-I\$(brew --prefix)/include LDFLAGS=-L\$(brew --prefix)/lib"
}

install_tools() {
  local packages
  read -ra packages <<<"$(apt_packages "$@")"
  apt_install "${packages[@]}"
}

require_tools() {
  local missing
  read -ra missing <<<"$(missing_tools | tr '\n' ' ')"
  if [ ${#missing[@]} = 0 ]; then return; fi
  if install_tools "${missing[@]}" && [ -z "$(missing_tools)" ]; then return; fi
  explain_missing "${missing[@]}"
  return 1
}

want_uv() {
  if [ "${INSTALLER:-uv}" != uv ]; then return 1; fi
  if .venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes \
    --requirement <(sed -n '/^uv==/,/[^\\]$/p' "$hashes") >>"$log" 2>&1 && .venv/bin/uv --version >>"$log" 2>&1; then
    return
  fi
  say "uv cannot be had here: pip takes its place, and more time"
  return 1
}

answers() {
  .venv/bin/python - "$1" 2>>"$log" <<'END'
import sys, urllib.request

urllib.request.urlopen(sys.argv[1], timeout=5).close()
END
}

cpu_torch=https://download.pytorch.org/whl/cpu

# Prints the index to take torch from; nothing means that of all other packages.
torch_index() {
  if [ -n "${TORCH_INDEX_URL:-}" ]; then
    echo "$TORCH_INDEX_URL"
  elif [ "$(uname)" != Linux ] || [ -e /proc/driver/nvidia ] || command -v nvidia-smi >/dev/null; then
    return
  elif answers "$cpu_torch/torch/"; then
    say "No NVIDIA driver is found: torch comes from $cpu_torch"
    echo "$cpu_torch"
  else
    say "No NVIDIA driver is found, and $cpu_torch does not answer: torch comes from where all packages come from"
  fi
}

# The solver of one dataset is compiled: where it cannot be, that dataset is missing.
add_solver() {
  if .venv/bin/python -c 'import pycosat' 2>/dev/null; then return; fi
  if ! compiles Python.h || ! (overrides=() && install --no-deps pycosat) 2>>"$log"; then
    say "pycosat cannot be compiled here: the dataset zebra_puzzles is missing, and nothing else"
  fi
}

python=$(find_python)
installer=${INSTALLER:-uv}
require_tools
started=$SECONDS
say "Installing into .venv with $("$python" --version) (once; a minute or a few)"
if ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  "$python" -m venv --clear .venv
fi
rm -f .venv/.installed-*
: >"$log"
if ! want_uv; then
  installer=pip
  require_tools
fi
index=$(torch_index)
if [ -n "$index" ]; then
  install --index-url "$index" --no-deps torch
fi
install --editable '.[dev]'
add_solver
# trio brings its types itself; these stubs, which libp2p pulls in, describe an older trio and would
# hide them from mypy.
rm -rf .venv/lib/python*/site-packages/trio-stubs
touch "$stamp"
say "Installed in $((SECONDS - started)) s"
