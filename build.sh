#!/usr/bin/env bash
# Everything a person does with this project, one command each: ./build.sh --help
# A command is a function cmd_NAME with a help text help_NAME whose first line is its summary.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
VENV="$ROOT/.venv"
CACHE="$ROOT/.cache"
SERVER_HOME="$ROOT/.server"
# The Python backend keeps its tensors in /dev/shm: some windows per song in flight, and its regions never shrink.
SHM_MIN_MIB="${MUSIC3_SHM_MIN_MIB:-256}"
START_TIMEOUT_S="${MUSIC3_START_TIMEOUT_S:-1800}"

say() { printf '%s\n' "build.sh: $*" >&2; }
die() {
  say "$*"
  exit 1
}

# shellcheck source=scripts/environment.sh
source "$ROOT/scripts/environment.sh"
# shellcheck source=scripts/server.sh
source "$ROOT/scripts/server.sh"

# ---------------------------------------------------------------- env and serve

help_env() {
  cat <<'TEXT'
Make the Python environment and the server (.venv, .server); nothing to do the second time.
Usage: ./build.sh env

Downloads about 400 MB the first time (several GB where pip finds only PyTorch's CUDA build), into this
folder alone. `tritonserver` on PATH, as in Triton's container, is used as it is. A missing system library
is installed with the system's package manager when run as root, else the command to run is named.
MUSIC3_PYTHON   the interpreter to use; otherwise python3.11, python3.12, python3.10 or python3 on PATH
TEXT
}
cmd_env() { locked base_environment; }

help_serve() {
  cat <<'TEXT'
Run the server in the foreground; Ctrl-C stops it.
Usage: ./build.sh serve [options] [-- tritonserver options]

  --checkpoint DIR      the official checkpoint; default MUSIC3_CHECKPOINT, else a small random one is made
  --host ADDRESS        address to listen on (default 127.0.0.1: this machine alone)
  --http-port N         default 8000
  --grpc-port N         default 8001
  --metrics-port N      default 8002
  --repository DIR      default model_repository/
  --stay                stay up when a model's process died; by default the server is ended then, as it can't
                        replace that process and songs would wait in vain, so that it may be started again

Shared memory of servers that died is removed first. /dev/shm must have 256 MiB free (MUSIC3_SHM_MIN_MIB).
TEXT
}
cmd_serve() {
  local host=127.0.0.1 http=8000 grpc=8001 metrics=8002 repository="$ROOT/model_repository" libpython site guard=1
  local checkpoint="${MUSIC3_CHECKPOINT:-}"
  while (($#)); do
    case "$1" in
      --checkpoint | --host | --http-port | --grpc-port | --metrics-port | --repository)
        (($# > 1)) || die "serve: $1 needs a value"
        ;;&
      --checkpoint) checkpoint="$2" ;;
      --host) host="$2" ;;
      --http-port) http="$2" ;;
      --grpc-port) grpc="$2" ;;
      --metrics-port) metrics="$2" ;;
      --repository) repository="$2" ;;
      --stay)
        guard=0
        shift
        continue
        ;;
      --)
        shift
        break
        ;;
      *) die "serve: unknown option $1 (./build.sh serve --help)" ;;
    esac
    shift 2
  done
  [[ -d "$repository" ]] || die "serve: there is no model repository $repository"
  if [[ -n "$checkpoint" ]]; then
    [[ -d "$checkpoint" ]] || die "serve: there is no checkpoint folder $checkpoint"
    checkpoint="$(cd "$checkpoint" && pwd)"
  fi
  locked base_environment
  if [[ -z "$checkpoint" ]]; then
    say "no --checkpoint and no MUSIC3_CHECKPOINT: serving a small random model (noise, not music)"
    locked make_tiny_checkpoint
    checkpoint="$CACHE/tiny"
  fi
  clear_shared_memory
  check_shared_memory

  local arguments=(
    --model-repository "$repository"
    --http-address "$host" --http-port "$http"
    --grpc-address "$host" --grpc-port "$grpc"
    --metrics-address "$host" --metrics-port "$metrics"
    # The configs are complete: without this, each model is imported once more, only to be asked.
    --disable-auto-complete-config
  )
  have_nvidia_gpu || arguments+=(--allow-gpu-metrics false)
  # A song holds a thread of the Python backend while it waits for a stage, and its chunks leave through others.
  local songs="${MUSIC3_MUSIC3_LIVE_SONGS:-${MUSIC3_LIVE_SONGS:-8}}"
  if [[ "$songs" =~ ^[0-9]{1,2}$ && "$*" != *thread-pool-size* ]]; then
    local threads="$((2 * 10#$songs + 16))"
    arguments+=("--backend-config=python,thread-pool-size=$((threads > 32 ? threads : 32))")
  fi
  export MUSIC3_CHECKPOINT="$checkpoint"
  # Of the server's own process, which keeps twice the memory otherwise; the models see to theirs.
  export MALLOC_ARENA_MAX="${MALLOC_ARENA_MAX:-2}"
  # The stub takes the environment of the first python3 on PATH, and only that.
  export PATH="$VENV/bin:$PATH"
  local program=tritonserver
  if ! have_tritonserver; then
    site="$(site_packages)"
    libpython="$(libpython_folder "$VENV/bin/python")" || die "libpython is gone; remove .venv and run ./build.sh env"
    LD_LIBRARY_PATH="$site/nvidia_pytriton.libs${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    [[ "$libpython" == system ]] || LD_LIBRARY_PATH="$LD_LIBRARY_PATH:$libpython"
    export LD_LIBRARY_PATH
    program="$site/pytriton/tritonserver/bin/tritonserver"
    arguments+=(--backend-directory "$SERVER_HOME/backends")
  fi
  say "serving $checkpoint on $host: HTTP $http, gRPC $grpc, metrics $metrics"
  if ((guard)); then
    # A child of the server, which takes over this process; it goes when the server goes.
    "$VENV/bin/python" -m python_backend_models.control guard "$$" "${host/0.0.0.0/127.0.0.1}:$http" </dev/null &
  fi
  exec "$program" "${arguments[@]}" "$@"
}

help_probe() {
  cat <<'TEXT'
Find out whether a running server can make songs; exit code 0 if so. Cheap enough for every ten seconds.
Usage: ./build.sh probe [--url HOST:PORT] [--timeout SECONDS]

The url is that of its gRPC door (default MUSIC3_URL or localhost:8001), the time-out 10 s by default. Triton's
own readiness stays green when a model's process has died; this does not.
TEXT
}
cmd_probe() {
  cmd_env
  exec "$VENV/bin/python" -m client.probe "$@"
}

help_drain() {
  cat <<'TEXT'
Have a server on this machine refuse new songs, and wait until the ones it is making are done.
Usage: ./build.sh drain [--stop] [--timeout SECONDS] [--pid PID] [--undo] [--folder DIR]

  --stop       end the server then; a server that is told to stop at once breaks its songs off
  --timeout S  wait that long at most (default 600); new songs stay refused
  --pid PID    of the tritonserver, where there are several
  --undo       accept songs again
  --folder DIR the server's control_folder, if not in MUSIC3_CONTROL_FOLDER (default /dev/shm)

Songs that wait for a place are turned away as UNAVAILABLE. Exit codes: 0 drained, 1 not yet, 2 no server.
TEXT
}
cmd_drain() {
  cmd_env
  exec "$VENV/bin/python" -m python_backend_models.control drain "$@"
}

# ---------------------------------------------------------------- demo, client, test, lint

DEMO_CAPTION="Warm acoustic folk, finger-picked guitar, brushed drums, a soft female voice"
DEMO_LYRICS="[Verse]
The river learns the colour of the sky
And carries every morning slowly by
[Chorus]
Stay a while, the light is on the water"

help_demo() {
  cat <<'TEXT'
Build what is needed, start the server, stream one song of 250 frames to song.wav, stop the server.
Usage: ./build.sh demo [client options]

The last line says what came: frames, samples, rate, time to first audio, total time and real-time factor.
MUSIC3_CHECKPOINT=DIR ./build.sh demo    sings with the official weights instead of a small random model
TEXT
}
cmd_demo() {
  local http grpc metrics log="$CACHE/demo-server-$$.log" pid summary status=0
  cmd_env
  start_own_server "$log"
  summary="$("$VENV/bin/python" -m client.cli --url "127.0.0.1:$grpc" --caption "$DEMO_CAPTION" --lyrics "$DEMO_LYRICS" \
    --max-frames 250 --out "$ROOT/song.wav" "$@")" || status=$?
  if ((status)); then
    tail -n 20 "$log" >&2
    die "the client failed with exit code $status; the end of the server's log is above, the whole in $log"
  fi
  stop_server "$pid"
  trap - EXIT
  rm -f "$log"
  printf '%s\n' "$summary"
}

help_client() {
  cat <<'TEXT'
Stream songs from a running server to files (all options: ./build.sh client --help).
TEXT
}
cmd_client() {
  cmd_env
  exec "$VENV/bin/python" -m client.cli "$@"
}

help_gateway() {
  cat <<'TEXT'
Serve POST /v1/audio/speech and a listening page over a running server (all options: ./build.sh gateway --help).
TEXT
}
cmd_gateway() {
  locked gateway_environment
  cd "$ROOT"
  exec "$VENV/bin/python" -m client.gateway "$@"
}

help_test() {
  cat <<'TEXT'
Run the tests, those through the real server too.
Usage: ./build.sh test [pytest arguments]
TEXT
}
cmd_test() {
  locked test_environment
  cd "$ROOT"
  exec "$VENV/bin/python" -m pytest "$@"
}

help_bench() {
  cat <<'TEXT'
Measure in one run against other implementations; tables here, JSON and plots in benchmarks/results/.
Usage: ./build.sh bench talker|acoustic|song|gpu [options]   (./build.sh bench talker --help says which)

  talker     the autoregressive engine against diffusers' loop, and how a step's cost grows
  acoustic   windows of one and of eight songs against diffusers and vllm-omni
  song       songs through the server at 1, 2, 4 and 8 clients: time to first audio, RTF, overhead
  gpu        full-size random weights on a CUDA device, under 8 minutes

Without --checkpoint, a random mid-size checkpoint (1.1 GB) is made in .cache/mid first.
TEXT
}
cmd_bench() {
  local name="${1:-}"
  [[ "$name" =~ ^[a-z]+$ && -f "$ROOT/benchmarks/$name.py" ]] || die "bench: which one? (./build.sh bench --help)"
  shift
  locked test_environment
  cd "$ROOT"
  local argument needs_checkpoint=1
  [[ "$name" == gpu ]] && needs_checkpoint=0
  for argument in "$@"; do
    case "$argument" in -h | --help | --checkpoint | --checkpoint=*) needs_checkpoint=0 ;; esac
  done
  if ((needs_checkpoint)); then
    "$VENV/bin/python" -m python_backend_models.tiny_checkpoint "$CACHE/mid" --size mid
    set -- --checkpoint "$CACHE/mid" "$@"
  fi
  exec "$VENV/bin/python" -m "benchmarks.$name" "$@"
}

# ---------------------------------------------------------------- checkpoint, memory, load test

help_checkpoint() {
  cat <<'TEXT'
Check a downloaded checkpoint in seconds, from file headers alone; says everything that is missing or differs.
Usage: ./build.sh checkpoint DIR [--any-size]

  --any-size   do not compare sizes and types with the official ones: for small checkpoints

Exit code 0: it can be served; 1: it can't. No weight is read: damage inside a file of the right length is not seen.
TEXT
}
cmd_checkpoint() {
  locked base_environment
  exec "$VENV/bin/python" -m python_backend_models.checkpoint_report "$@"
}

help_memory() {
  cat <<'TEXT'
What fits on a GPU, with the arithmetic: songs at once, key-value pool, and the settings to serve with.
Usage: ./build.sh memory [--gpu 24|40|80|141]

Computed from the official checkpoint's sizes; no checkpoint and no GPU needed, and nothing is measured.
TEXT
}
cmd_memory() {
  locked base_environment
  exec "$VENV/bin/python" -m python_backend_models.memory_plan "$@"
}

help_loadtest() {
  cat <<'TEXT'
Load a server with perf_analyzer and report by number of clients: first sound, gaps, RTF, stalls, throughput.
Usage: ./build.sh loadtest [options]   (all options: ./build.sh loadtest --options)

Without --url, a server is started for it, on MUSIC3_CHECKPOINT or a small random model, and songs are 10 s long.
The report goes to benchmarks/results/loadtest: table, JSON, PNG, and one HTML page with everything in it.
TEXT
}
cmd_loadtest() {
  local argument http grpc metrics log="$CACHE/loadtest-server-$$.log" pid status=0
  local arguments=(--out "$ROOT/benchmarks/results/loadtest" "$@")
  locked loadtest_environment
  if ! command -v perf_analyzer >/dev/null; then
    arguments=(--perf-analyzer "$CACHE/perf/bin/perf_analyzer" --library-path "$CACHE/perf/lib" "${arguments[@]}")
  fi
  for argument in "$@"; do
    case "$argument" in
      --options) exec "$VENV/bin/python" -m client.loadtest --help ;;
      --url | --url=*) exec "$VENV/bin/python" -m client.loadtest "${arguments[@]}" ;;
    esac
  done
  start_own_server "$log"
  "$VENV/bin/python" -m client.loadtest --url "127.0.0.1:$grpc" --seconds 10 "${arguments[@]}" || status=$?
  stop_server "$pid"
  trap - EXIT
  ((status)) || rm -f "$log"
  return "$status"
}

help_soak() {
  cat <<'TEXT'
Keep a server busy with mixed songs for some minutes; fails when anything grows, or a checked song changes.
Usage: ./build.sh soak [--minutes M] [--seed N] [--out DIR]

  --minutes M  how long (default 10); under 2 there are hardly enough readings to judge
  --seed N     of the clients' choices (default 0)
  --out DIR    for soak.json, soak.png and server.log (default benchmarks/results/soak)

A server with a small random model is started for it. Long and short songs, cancels, deadlines, bad input and
bursts, over gRPC and HTTP; memory of each process, /dev/shm, open files and threads are read between them.
Growth: the median of the last third, after a quarter for warming up, is over 5 % above that of the first.
TEXT
}
cmd_soak() {
  locked test_environment
  cd "$ROOT"
  exec "$VENV/bin/python" -m tests.soak.soak "$@"
}

help_lint() {
  cat <<'TEXT'
Check format and style of Python and shell files; --fix formats them.
Usage: ./build.sh lint [--fix]
TEXT
}
cmd_lint() {
  locked test_environment
  cd "$ROOT"
  if [[ "${1:-}" == --fix ]]; then
    "$VENV/bin/ruff" format .
    "$VENV/bin/ruff" check --fix .
  else
    "$VENV/bin/ruff" format --check .
    "$VENV/bin/ruff" check .
  fi
  "$VENV/bin/shellcheck" --external-sources build.sh .ci/run
}

# ---------------------------------------------------------------- dispatch

usage() {
  local name
  printf 'Usage: ./build.sh COMMAND [arguments]\n\n'
  for name in $(declare -F | sed -n 's/^declare -f cmd_//p'); do
    printf '  %-10s %s\n' "${name//_/-}" "$("help_$name" | head -1)"
  done
  printf '\n./build.sh COMMAND --help says more.\n'
}

main() {
  local command="${1:---help}" name
  case "$command" in -h | --help | help) usage && return ;; esac
  shift
  name="${command//-/_}"
  if ! declare -F "cmd_$name" >/dev/null; then
    usage >&2
    die "there is no command $command"
  fi
  # The client and the gateway have a --help of their own, with all their options.
  case "$name" in
    client | gateway) ;;
    *) if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then "help_$name" && return; fi ;;
  esac
  "cmd_$name" "$@"
}

main "$@"
