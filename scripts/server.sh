# Part of build.sh: what surrounds a running server: its checkpoint, shared memory, start and stop.
# shellcheck shell=bash

tiny_digest() {
  find "$ROOT/python_backend_models" -name '*.py' -print0 | sort -z | xargs -0 cat | sha256sum | cut -d' ' -f1
}
make_tiny_checkpoint() {
  local stamp="$CACHE/tiny.stamp"
  [[ -d "$CACHE/tiny" && -e "$stamp" && "$(cat "$stamp")" == "$(tiny_digest)" ]] && return
  say "making a small random checkpoint in .cache/tiny"
  rm -rf "$CACHE/tiny"
  (cd "$ROOT" && "$VENV/bin/python" -m python_backend_models.tiny_checkpoint "$CACHE/tiny") >&2
  tiny_digest >"$stamp"
}

unmapped_regions() {
  local region mapped
  mapped="$(cat /proc/[0-9]*/maps 2>/dev/null | grep -o '/dev/shm/triton_python_backend_shm_region_[^ ]*' | sort -u)" || true
  for region in /dev/shm/triton_python_backend_shm_region_*; do
    if [[ -O "$region" ]] && ! grep -qxF "$region" <<<"$mapped"; then printf '%s\n' "$region"; fi
  done
}
# A server that was killed leaves its regions behind. Two looks: one just being made is not mapped yet.
clear_shared_memory() {
  local first second region
  first="$(unmapped_regions)"
  [[ -n "$first" ]] || return 0
  sleep 0.5
  second="$(unmapped_regions)"
  while read -r region; do
    if grep -qxF "$region" <<<"$second"; then
      say "removing shared memory that no process maps any more: $region"
      rm -f "$region"
    fi
  done <<<"$first"
}
check_shared_memory() {
  local free_mib
  free_mib="$(df -Pk /dev/shm | awk 'NR == 2 { print int($4 / 1024) }')"
  if ((free_mib < SHM_MIN_MIB)); then
    die "/dev/shm has $free_mib MiB free and the server needs $SHM_MIN_MIB: in a container start it with --shm-size=2g" \
      "(or --ipc=host); elsewhere: mount -o remount,size=2g /dev/shm. MUSIC3_SHM_MIN_MIB changes the limit."
  fi
}

# Three ports below those that Linux gives to clients' sockets, so that none takes one before the server has it.
free_ports() {
  "$VENV/bin/python" -c 'import random, socket
ports = []
for port in random.sample(range(20000, 32768), 1000):
    try:
        ports.append(socket.create_server(("127.0.0.1", port)))
    except OSError:
        continue
    if len(ports) == 3:
        break
print(*(each.getsockname()[1] for each in ports))'
}
# GET /v2/health/ready without needing curl.
server_ready() {
  local status
  status="$(
    exec 2>/dev/null 8<>"/dev/tcp/127.0.0.1/$1" || exit 1
    printf 'GET /v2/health/ready HTTP/1.0\r\nHost: localhost\r\n\r\n' >&8
    IFS= read -r -t 10 line <&8 && printf '%s' "$line"
  )" || return 1
  [[ "$status" == *" 200 "* ]]
}
stop_server() {
  local pid="$1" _
  kill -TERM "$pid" 2>/dev/null || return 0
  for _ in {1..400}; do
    kill -0 "$pid" 2>/dev/null || break
    sleep 0.1
  done
  kill -KILL "$pid" 2>/dev/null || true
  wait "$pid" 2>/dev/null || true
}
# Starts a server on free ports until this script ends, and waits for it; sets the caller's http, grpc, metrics, pid.
start_own_server() {
  local log="$1"
  read -r http grpc metrics < <(free_ports)
  [[ -n "${MUSIC3_CHECKPOINT:-}" ]] || say "no MUSIC3_CHECKPOINT: a small random model will sing (noise, not music)"
  say "starting the server on free ports (log: $log)"
  "$ROOT/build.sh" serve --http-port "$http" --grpc-port "$grpc" --metrics-port "$metrics" >"$log" 2>&1 </dev/null &
  pid=$!
  # shellcheck disable=SC2064 # this pid, now
  trap "stop_server $pid" EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  wait_for_server "$pid" "$http" "$log"
}
# Triton 2.51 waits for ever for a model whose process died while loading; it stays a zombie of the server's.
has_dead_model() { grep -qs ") Z $1 " /proc/[0-9]*/stat; }
wait_for_server() {
  local pid="$1" port="$2" log="$3" deadline=$((SECONDS + START_TIMEOUT_S)) dead=0
  until server_ready "$port"; do
    if has_dead_model "$pid"; then dead=$((dead + 1)); else dead=0; fi
    if ((dead > 12)) || ! kill -0 "$pid" 2>/dev/null; then
      tail -n 40 "$log" >&2
      die "the server did not start; the end of its log is above, the whole in $log"
    elif ((SECONDS > deadline)); then
      tail -n 40 "$log" >&2
      die "the server was not ready after $START_TIMEOUT_S s (MUSIC3_START_TIMEOUT_S); its log is $log"
    fi
    sleep 0.25
  done
}
