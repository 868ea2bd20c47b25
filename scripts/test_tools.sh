#!/usr/bin/env bash
# Installs what some tests need of the system, where it may (Linux, root): those of `make test-all`.
# Usage: scripts/test_tools.sh STAMP_FILE. What cannot be had is said, and its tests are counted as
# not run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
stamp=${1:?usage: scripts/test_tools.sh STAMP_FILE}

. scripts/packages.sh

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

want_nft
want_chromium
want_mosquitto
want_prometheus
touch "$stamp"
