# Installs packages into .venv by uv, or by pip; for sourcing. Wants `log`, the file for what they say.

say() { printf '%s\n' "$*" >&2; }

installer=pip
if [ "${INSTALLER:-uv}" = uv ] && [ -x .venv/bin/uv ]; then installer=uv; fi

# Large downloads, builds and the final step, one line each; all the rest goes to the log.
progress() {
  awk -v log_file="$log" '
    { print >> log_file; fflush(log_file) }
    /Downloading .*[0-9][0-9]\.[0-9] ?Mi?B|Downloading .* Gi?B/ { sub(/^ */, ""); print "  " $0; fflush() }
    /^ *Building wheel for .*started/ { print "  Building " $4; fflush() }
    /^ *Building [^ ]+(==| @ )/ { sub(/^ */, ""); print "  " $0; fflush() }
    /^Installing collected packages/ { print "  Installing " NF - 3 " packages"; fflush() }
    /^Installed [0-9]+ packages/ { print "  " $1, $2, $3; fflush() }
  ' >&2
}

overrides=(--overrides scripts/overrides.txt)
hashes=scripts/hashes.txt
mismatch="Hash mismatch"  # uv's words
full="No space left on device"
needed="about 4 GB" # .venv without vLLM, and the downloads that uv keeps

# pip knows no overrides, and takes what libp2p asks for. It checks hashes of all that it installs or of
# nothing, and there are none of torch and of what has no file, so of nothing.
with_pip() {
  .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off \
    --constraint <(grep -v '^fastecdsa==' constraints.txt) "$@" 2>&1 | progress
}

# uv reads none of pip's settings: sets `uv`, the command with them handed over.
set_uv() {
  local name value
  uv=(env UV_LINK_MODE=copy UV_INDEX_STRATEGY=unsafe-best-match) # as pip chooses
  while IFS='=' read -r name value; do
    value=${value//\'/}
    case ${name##*.} in
      index-url) uv+=("UV_DEFAULT_INDEX=$value") ;;
      extra-index-url) uv+=("UV_INDEX=$value") ;;
      find-links) uv+=("UV_FIND_LINKS=${value// /,}") ;;
      cert) uv+=("SSL_CERT_FILE=$value") ;;
      default-timeout | timeout) uv+=("UV_HTTP_TIMEOUT=$value") ;;
    esac
  done < <(.venv/bin/python -m pip config list 2>/dev/null)
  uv+=(.venv/bin/uv)
}

# Writes what files the versions of constraints.txt are. torch has others on each index.
lock_hashes() {
  local uv
  set_uv
  sed '/^torch==/d; /^# /d' constraints.txt |
    "${uv[@]}" pip compile --quiet --no-deps --generate-hashes --no-header --no-annotate \
      --universal --python-version 3.11 --output-file "$hashes" - >/dev/null
}

with_uv() {
  local uv
  set_uv
  "${uv[@]}" pip install --python .venv/bin/python --no-progress \
    --constraint constraints.txt --constraint "$hashes" ${overrides[@]+"${overrides[@]}"} "$@" 2>&1 |
    progress
}

# The log may be on the full disk, and so lack the error.
is_full() {
  local free_mb
  free_mb=$(df -Pm .venv | awk 'NR == 2 { print $4 }')
  if [ "$free_mb" -ge 50 ] && ! grep -q "$full" "$log"; then return 1; fi
  say "The disk is full: $free_mb MB are left for .venv. Installing takes $needed"
}

install() {
  if [ "$installer" = uv ]; then
    with_uv "$@" && return
    if grep -q "$mismatch" "$log"; then
      grep -A 8 "$mismatch" "$log" | tail -n 9 >&2
      say "A package is not the file that $hashes names: nothing was installed"
      return 1
    fi
    if is_full; then return 1; fi
    say "uv could not install; pip tries (what uv said is in $log)"
    installer=pip
  fi
  if ! with_pip "$@"; then
    if is_full; then return 1; fi
    tail -n 15 "$log" >&2
    say "Installing failed; all that pip said is in $log"
    return 1
  fi
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
