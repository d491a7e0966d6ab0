#!/usr/bin/env bash
# The container's program: `build.sh serve` with the given options. On SIGTERM or SIGINT it refuses new songs and
# lets the live ones end, MUSIC3_DRAIN_S seconds at most (0: not at all), then passes SIGTERM on; a second signal
# passes it on at once. Triton itself would break all songs off. Exits with the server's exit code.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

drain_s="${MUSIC3_DRAIN_S:-0}"
[[ "$drain_s" =~ ^[0-9]+$ ]] || {
  echo "entrypoint.sh: MUSIC3_DRAIN_S is $drain_s, not a whole number of seconds" >&2
  exit 2
}
drain=""

stop() {
  trap 'kill -TERM "$server" 2>/dev/null || true' TERM INT
  if ((drain_s)); then
    .venv/bin/python -m python_backend_models.control drain --pid "$server" --timeout "$drain_s" </dev/null &
    drain=$!
    wait "$drain" || true
  fi
  kill -TERM "$server" 2>/dev/null || true
}

./build.sh serve "$@" </dev/null &
server=$!
trap stop TERM INT
# A signal ends `wait` early, with a code above 128.
status=0
wait "$server" || status=$?
while kill -0 "$server" 2>/dev/null; do
  status=0
  wait "$server" || status=$?
done
[[ -z "$drain" ]] || kill "$drain" 2>/dev/null || true
exit "$status"
