#!/usr/bin/env bash
# Makes .venv with everything that this project needs, exactly as constraints.txt says.
# Usage: scripts/bootstrap.sh STAMP_FILE; `make` calls it when STAMP_FILE is missing.
#
# Environment:
#   PYTHON           the interpreter to use (default: the first of python3.11 ... python3)
#   TORCH_INDEX_URL  a package index to take torch alone from: PyTorch's CPU index saves a machine
#                    without an NVIDIA GPU several gigabytes
#   All variables of pip itself (PIP_INDEX_URL, PIP_CERT, ...) hold as well.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
stamp=${1:?usage: scripts/bootstrap.sh STAMP_FILE}
log=.venv/install.log

say() { printf '%s\n' "$*" >&2; }

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

# One of libp2p's dependencies (fastecdsa) is compiled here, against GMP and Python's headers.
compiles() {
  local include
  include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
  echo "#include <$1>" | "${CC:-cc}" -I"$include" ${CFLAGS:-} ${CPPFLAGS:-} -fsyntax-only -x c - 2>/dev/null
}

# What the system lacks, one word each: compiler, venv, python-headers, gmp.
missing_tools() {
  "$python" -c 'import ensurepip, venv' 2>/dev/null || echo venv
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

apt_install() {
  local root=() packages=("$@")
  if ! command -v apt-get >/dev/null; then return 1; fi
  if [ "$(id -u)" != 0 ]; then
    sudo -n true 2>/dev/null || return 1
    root=(sudo -n)
  fi
  say "Installing ${packages[*]} with apt-get"
  local install=(${root[@]+"${root[@]}"} env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${packages[@]}")
  "${install[@]}" >/dev/null 2>&1 ||
    { ${root[@]+"${root[@]}"} apt-get update -qq >/dev/null 2>&1 && "${install[@]}" >/dev/null; }
}

require_tools() {
  local missing
  read -ra missing <<<"$(missing_tools | tr '\n' ' ')"
  if [ ${#missing[@]} = 0 ]; then return; fi
  if install_tools "${missing[@]}" && [ -z "$(missing_tools)" ]; then return; fi
  explain_missing "${missing[@]}"
  return 1
}

# Large downloads, builds and the final step, one line each; all the rest goes to the log.
progress() {
  awk -v log_file="$log" '
    { print >> log_file; fflush(log_file) }
    /Downloading .*[0-9][0-9]\.[0-9] MB|Downloading .* GB/ { sub(/^ */, ""); print "  " $0; fflush() }
    /^ *Building wheel for .*started/ { print "  Building " $4; fflush() }
    /^Installing collected packages/ { print "  Installing " NF - 3 " packages"; fflush() }
  ' >&2
}

pip_install() {
  if ! .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off \
    --constraint constraints.txt "$@" 2>&1 | progress; then
    tail -n 15 "$log" >&2
    say "Installing failed; all that pip said is in $log"
    return 1
  fi
}

# Tests with hosts behind masquerading routers need it. They are counted as not run without.
want_nft() {
  if [ "$(uname)" != Linux ] || [ "$(id -u)" != 0 ] || command -v nft >/dev/null; then return; fi
  apt_install nftables || say "nftables is not installed: tests behind routers will not run"
}

# Tests of the web page need it. They are counted as not run without.
want_chromium() {
  if [ "$(uname)" != Linux ] || [ "$(id -u)" != 0 ] || command -v chromium >/dev/null; then return; fi
  apt_install chromium || say "chromium is not installed: tests of the web page will not run"
}

# Tests with a real MQTT broker start one of their own. They are counted as not run without.
want_mosquitto() {
  if [ "$(uname)" != Linux ] || [ "$(id -u)" != 0 ]; then return; fi
  if PATH="$PATH:/usr/sbin" command -v mosquitto >/dev/null; then return; fi
  apt_install mosquitto || say "mosquitto is not installed: tests with a broker will not run"
}

# A test of the metrics page starts one of its own. Debian's would also run as a service, open to the
# network: where there are services it is left to the machine's owner.
want_prometheus() {
  if [ "$(uname)" != Linux ] || [ "$(id -u)" != 0 ] || [ -d /run/systemd/system ]; then return; fi
  if command -v prometheus >/dev/null; then return; fi
  apt_install --no-install-recommends prometheus || say "prometheus is not installed: the test with it will not run"
}

python=$(find_python)
require_tools
want_nft
want_chromium
want_mosquitto
want_prometheus
started=$SECONDS
say "Installing into .venv with $("$python" --version) (once; a few minutes)"
if ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  "$python" -m venv --clear .venv
fi
rm -f .venv/.installed-*
: >"$log"
if [ -n "${TORCH_INDEX_URL:-}" ]; then
  pip_install --index-url "$TORCH_INDEX_URL" --no-deps torch
fi
pip_install --editable '.[dev]'
# trio brings its types itself; these stubs, which libp2p pulls in, describe an older trio and would
# hide them from mypy.
rm -rf .venv/lib/python*/site-packages/trio-stubs
touch "$stamp"
say "Installed in $((SECONDS - started)) s"
