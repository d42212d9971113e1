# Makes an environment with this checkout installed into it, or finds it up to date. Sourced by tools/serve and tools/test.
#
#   setup LEVEL [EXTRA...]    LEVEL: which variants of the kernels, the "best" for this machine or all that are "runnable" on it
#                             EXTRA: extras of pyproject.toml that are needed, such as: setup runnable cpu test
#
# TOKAMAK_VENV       where the environment is (default: .venv in the checkout, .venv-gpu or .venv-xpu for these builds of Paddle;
#                    a relative path is one from where the caller is)
# TOKAMAK_PYTHON     the interpreter it is made with (default: the first of python3, python3.13 ... python3.10 that will do)
# TOKAMAK_BUILD_ALL  1: kernels for every processor, not for this machine alone
# TOKAMAK_INSTALLER  pip: without uv, which takes a tenth of pip's time (default: uv where it has a build for this machine)

set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$(realpath -ms -- "${TOKAMAK_VENV:-$root/.venv}")" # at once: some of what follows runs elsewhere
build_tools="$venv/build-tools"

# Modules are compiled when they are first imported, and kept so, also where a container asks for the opposite: each of an
# engine's six processes would compile all of its own at every start, which doubles what a start takes.
unset PYTHONDONTWRITEBYTECODE

say() { printf 'tokamak: %s\n' "$*" >&2; }

fail() {
  say "error: $*"
  exit 1
}

# An interpreter that Paddle has wheels for.
find_python() {
  local candidate candidates=(python3 python3.13 python3.12 python3.11 python3.10)
  [ -z "${TOKAMAK_PYTHON:-}" ] || candidates=("$TOKAMAK_PYTHON")
  for candidate in "${candidates[@]}"; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null; then
      realpath -s -- "$(command -v "$candidate")"
      return
    fi
  done
  fail "no Python 3.10 to 3.13 found (python3 is $(python3 --version 2>&1 || true)); install one, or name it with TOKAMAK_PYTHON"
}

hash_of() { sha256sum | cut -d' ' -f1; }

# ----------------------------------------------------------------------------------------- what is there, and whether it will do

# What the packages in the environment depend on. Scripts in it name both directories.
package_fingerprint() { (cd "$root" && cat pyproject.toml && echo "$root" "$venv" && "$venv/bin/python" --version) | hash_of; }

# What the native modules of one Python depend on, whichever environment they are built in. Python sources are used in place, so
# they are part of neither.
native_fingerprint() {
  (
    cd "$root"
    find CMakeLists.txt shm/native ops/*/native -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
    grep '^requires = ' pyproject.toml || true
    { grep -m1 -E '^(flags|Features)' /proc/cpuinfo || true; } | grep -oE '\b(fma|avx2|avx_vnni|avx512\w*|amx_\w*)\b' || true
  ) | hash_of
}

# Whether the modules that were built last have the variants of `level`, or more.
has_level() {
  case "$1 $2" in "best "* | "runnable runnable" | *" all") ;; *) return 1 ;; esac
}

is_native_built() {
  local built hash
  read -r built hash 2>/dev/null <"$native_build/tokamak-native" || return 1
  [ "$hash" = "$native_fingerprint" ] && has_level "$level" "$built" && has_modules
}

# The modules of the environment's Python: size and path, one a line.
list_modules() {
  local tag="${native_build##*/python}"
  (cd "$root" && find shm ops -maxdepth 1 -name "_*.cpython-${tag/./}*.so" -size +0 -printf '%s %p\n' | LC_ALL=C sort)
}

# Whether the modules are there, with the sizes that they were built with.
has_modules() {
  local found
  found="$(list_modules)"
  grep -q ' shm/_native\.' <<<"$found" && grep -q ' ops/_cpu\.' <<<"$found" &&
    ! tail -n +2 "$native_build/tokamak-native" | grep -vxF -- "$found" >/dev/null
}

# What was installed last is what is needed now. Writes nothing, and sets both fingerprints and where modules are built: those of
# another Python, which have other names, lie beside them.
is_up_to_date() {
  local libraries=("$venv"/lib/python3*)
  [ -e "$venv/.tokamak-made" ] || return 1
  native_build="$root/build/${libraries[0]##*/}"
  package_fingerprint="$(package_fingerprint)" || return
  native_fingerprint="$(native_fingerprint)" || return
  has_packages "$@" && is_native_built
}

has_packages() {
  local name
  for name in base "$@"; do
    [ -e "$venv/.tokamak-$name" ] && [ "$(<"$venv/.tokamak-$name")" = "$package_fingerprint" ] || return 1
  done
}

# Whether packages were being installed when the last setup was killed, or the Python that made the environment is gone.
is_venv_broken() {
  [ ! -e "$venv/.tokamak-unfinished" ] || return 0
  ! "$venv/bin/python" -c 'import os, sys, sysconfig; sys.exit(not os.path.isdir(sysconfig.get_path("purelib")))' 2>/dev/null
}

# What else is kept there (models, environments of clients) stays.
remove_packages() { rm -rf "$venv"/{bin,include,lib,lib64,pyvenv.cfg,build-tools} "$venv"/.tokamak-{made,base,unfinished}; }

make_venv() {
  local python
  python="$(find_python)"
  say "making $venv with $("$python" --version)"
  if "$python" -c 'import venv, pip, sys; sys.exit([*map(int, pip.__version__.split(".")[:2])] < [22, 3])' 2>/dev/null; then
    "$python" -m venv --without-pip "$venv" # which the interpreter's own fills, in a fraction of the time
  else
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
      fail "$python cannot make virtual environments; install its venv module (Debian, Ubuntu: apt install python3-venv)"
    "$python" -m venv "$venv"
  fi
  echo "$python" >"$venv/.tokamak-made"
}

# The environment's pip, or that of the interpreter that made it until there is one.
find_pip() {
  pip=("$venv/bin/python" -m pip)
  [ -e "$venv/bin/pip" ] || pip=("$(<"$venv/.tokamak-made")" -m pip --python "$venv/bin/python")
}

# Packages are compiled when they are first imported.
pip_install() { "${pip[@]}" install --disable-pip-version-check --no-compile --no-warn-conflicts "$@"; }

get_uv() { pip_install --no-deps --only-binary :all: uv || true; } # `find_installer` says what follows where there is none

# uv, which comes by pip, or pip alone: `install ARGUMENTS...` of options that both have.
find_installer() {
  find_pip
  if [ "${TOKAMAK_INSTALLER:-uv}" = uv ]; then
    [ -x "$venv/bin/uv" ] || { begin uv get_uv && wait_for_jobs uv; }
    if [ -x "$venv/bin/uv" ]; then
      "$venv/bin/uv" cache dir >/dev/null 2>&1 && mkdir -p "$("$venv/bin/uv" cache dir)" 2>/dev/null ||
        export UV_CACHE_DIR="$venv/uv-cache" # nobody's home, or one that cannot be written
      install() { "$venv/bin/uv" pip install --python "$venv/bin/python" "$@"; }
      take_over_indexes
      return
    fi
    say "uv could not be installed (see $(log_of uv)); pip installs instead, which takes longer"
  fi
  install() { pip_install "$@"; }
}

# Where pip is told to find packages (pip.conf, PIP_*) uv finds them too, which reads settings of its own alone. Those win.
take_over_indexes() {
  local settings name option separator value section
  settings="$("${pip[@]}" config list 2>/dev/null || true)"
  while read -r name option separator; do
    value=""
    for section in global install :env:; do # as pip: the last one wins
      value="$(sed -nE "s/^$section\\.$option=['\"](.*)['\"]\$/\\1/p" <<<"$settings" | sed -E 's/(\\n| )+/ /g; s/^ //' | grep . || echo "$value")"
    done
    [ -z "$value" ] || [ -n "${!name:-}" ] || export "$name=${value// /${separator:- }}"
  done <<'SETTINGS'
UV_DEFAULT_INDEX index-url
UV_INDEX extra-index-url
UV_FIND_LINKS find-links ,
UV_NO_INDEX no-index
UV_INSECURE_HOST trusted-host
SSL_CERT_FILE cert
SETTINGS
  export UV_INDEX_STRATEGY="${UV_INDEX_STRATEGY:-unsafe-best-match}" # the newest version of all indexes, as pip
}

# The requirements of pyproject.toml that a person would write after `pip install`, one a line: PART is build, base or an extra.
requirements() {
  "${pip[0]}" - "$root/pyproject.toml" "$@" <<'PYTHON'
import sys
try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib
with open(sys.argv[1], "rb") as file:
    content = tomllib.load(file)
parts = {"build": content["build-system"]["requires"], "base": content["project"]["dependencies"]}
parts |= content["project"]["optional-dependencies"]
print(*(requirement for part in sys.argv[2:] for requirement in parts[part]), sep="\n")
PYTHON
}

# The machine's, if it is new enough.
has_cmake() {
  local least found
  least="$(sed -n 's/^cmake_minimum_required(VERSION \(.*\))/\1/p' "$root/CMakeLists.txt")"
  found="$(cmake --version 2>/dev/null | sed -n '1s/.* //p')"
  [ -n "$found" ] && printf '%s\n' "$least" "$found" | sort -CV
}

# What builds the modules, in a place of its own, so that a later build finds everything where it was. By pip, as it is little: the
# compiler then works while uv is fetched.
install_build_tools() {
  local tools
  mapfile -t tools < <(requirements build | grep nanobind)
  has_cmake || tools+=(cmake)
  command -v ninja >/dev/null || tools+=(ninja)
  pip=("${pip[@]:0:3}") # a place is nobody's environment
  pip_install --upgrade --target "$build_tools" "${tools[@]}"
}

with_build_tools() { PYTHONPATH="$build_tools" PATH="$build_tools/bin:$PATH" "$@"; }

# The modules, beside their sources. Once a build directory is there, only what changed is compiled.
build_native() {
  local lock tag="${native_build##*/python}"
  mkdir -p "$root/build"
  exec {lock}>"$root/build/tokamak-lock" # other environments build in the same place
  ! command -v flock >/dev/null || flock "$lock"
  ! is_native_built || return 0
  has_modules 2>/dev/null || rm -f "$root"/{shm,ops}/_*.cpython-"${tag/./}"*.so # ninja would keep one that was cut off
  { [ -d "$build_tools/nanobind" ] && has_packages; } || install_build_tools
  grep -qsxF "CMAKE_HOME_DIRECTORY:INTERNAL=$root" "$native_build/CMakeCache.txt" || rm -rf "$native_build" # of a checkout that moved
  rm -f "$native_build/tokamak-native" # until they are whole, nobody else takes those of before for built
  with_build_tools cmake -S "$root" -B "$native_build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DSKBUILD_STATE=editable \
    -DTOKAMAK_VARIANTS="$level" -DPython_EXECUTABLE="$venv/bin/python" -Dnanobind_DIR="$build_tools/nanobind/cmake" \
    -DCMAKE_MAKE_PROGRAM="$(with_build_tools bash -c 'command -v ninja')" # that of another environment may be gone
  # Ninja takes more by itself: what takes longest would share its core
  with_build_tools cmake --build "$native_build" --parallel "${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}"
  { echo "$level $native_fingerprint" && list_modules; } >"$native_build/tokamak-native"
}

# Paddle's own index, which alone has its builds for devices: of the extras that are named, the channel that has them.
paddle_index() {
  local extra channels="https://www.paddlepaddle.org.cn/packages/stable"
  for extra in "$@"; do
    case "$extra" in
      gpu) printf '%s\n' --extra-index-url "$channels/cu126/" ;;
      xpu) printf '%s\n' --extra-index-url "$channels/xpu-p800/" ;;
    esac
  done
}

install_packages() {
  local packages index
  mapfile -t packages < <(requirements base "$@")
  mapfile -t index < <(paddle_index "$@")
  install "${index[@]}" pip "${packages[@]}"
  install --no-deps --config-settings=wheel.cmake=false --editable "$root"
  # Its finder knows the modules of today by name and would look for one that moves where it was; the path alone finds all.
  printf '%s\n' "$root" "$root/tools/package" >"$(echo "$venv"/lib/python3.*/site-packages)/_editable_skbc_tokamak_serve.pth"
}

# --------------------------------------------------------------------------------------------- jobs, and how far they are

declare -A jobs=() # what runs: its name -> its process group

log_of() { echo "$venv/${1// /-}.log"; }

# begin NAME COMMAND...: in a process group of its own, its messages in a log.
begin() {
  local name="$1"
  shift
  : >"$(log_of "$name")" # `how_far` may look before the job has begun
  set -m
  "$@" </dev/null >"$(log_of "$name")" 2>&1 &
  jobs[$name]=$!
  set +m
}

end_jobs() {
  local name
  for name in "${!jobs[@]}"; do kill -TERM -- "-${jobs[$name]}" 2>/dev/null || true; done
}

how_far() {
  local name log line="" part
  for name in "${!jobs[@]}"; do
    log="$(log_of "$name")"
    case "$name" in
      packages) part="$(grep -oE '^ *(Collecting|Downloading|Resolved|Prepared|Installing) [^ ]+' "$log" | tail -n1 | xargs || true)" ;;
      *) part="$(grep -oE '\[[0-9]+/[0-9]+\]' "$log" | tail -n1 | tr -d '[]' | sed 's:/: of :' || true)" ;;
    esac
    line+="${line:+, }$name${part:+: $part}"
  done
  echo "$line"
}

# is_running [NAME]: whether that job is, or any.
is_running() { [ "${#jobs[@]}" -gt 0 ] && { [ $# -eq 0 ] || [ -n "${jobs[$1]:-}" ]; }; }

# wait_for_jobs [NAME]: for that job or for all; where one fails the others end, and its last messages are shown.
wait_for_jobs() {
  local name status line tick=0 ticks_shown=50 # a look takes longer than all else here
  [ ! -t 2 ] || ticks_shown=5
  while is_running "$@"; do
    for name in "${!jobs[@]}"; do
      kill -0 "${jobs[$name]}" 2>/dev/null && continue
      status=0
      wait "${jobs[$name]}" || status=$?
      unset "jobs[$name]"
      [ "$status" -eq 0 ] && continue
      [ "$name $((status > 128))" != "packages 0" ] || rm -f "$venv/.tokamak-unfinished" # it ended by itself
      end_jobs
      [ ! -t 2 ] || printf '\r\033[K' >&2
      grep -vE "^ *WARNING: Location .* is ignored" "$(log_of "$name")" | tail -n 40 >&2 || true
      fail "$name: failed; its messages end as above, all are in $(log_of "$name")"
    done
    if is_running && [ $((++tick % ticks_shown)) -eq 0 ]; then
      line="$(how_far)"
      if [ -t 2 ]; then
        printf '\r\033[Ktokamak: %s' "$line" >&2
      else
        say "$line"
      fi
    fi
    ! is_running "$@" || sleep 0.2
  done
  [ ! -t 2 ] || printf '\r\033[K' >&2
}

# -------------------------------------------------------------------------------------------------------------- setup

install_into_venv() {
  local name
  command -v c++ >/dev/null || command -v g++ >/dev/null ||
    fail "no C++ compiler found; the native modules need one (Debian, Ubuntu: apt install g++)"
  trap 'exit 130' INT TERM
  trap end_jobs EXIT
  find_pip
  is_native_built || {
    say "building native modules (kernels: $level)"
    begin "native modules" build_native
  }
  has_packages "$@" || {
    say "installing packages"
    rm -f "$venv/.tokamak-base"
    : >"$venv/.tokamak-unfinished"
    find_installer
    begin packages install_packages "$@"
  }
  wait_for_jobs
  rm -f "$venv/.tokamak-unfinished"
  for name in base "$@"; do
    echo "$package_fingerprint" >"$venv/.tokamak-$name"
  done
  trap - INT TERM EXIT
}

# One setup at a time: waits for another, and says so. The lock is held until `lock`, a descriptor, is closed.
lock_venv() {
  { mkdir -p "$venv" && exec {lock}>"$venv/.tokamak-lock"; } ||
    fail "$venv is missing or out of date and cannot be written; run this as its owner, or name another with TOKAMAK_VENV"
  command -v flock >/dev/null || return 0
  flock --nonblock "$lock" && return
  say "waiting for another tools/serve or tools/test that installs into $venv"
  flock "$lock"
}

# Where there is nothing to do it needs no lock, so the checkout may be read-only or another user's. The second of two finds
# everything done.
setup() {
  local lock level="$1" package_fingerprint native_fingerprint native_build
  shift
  [ "${TOKAMAK_BUILD_ALL:-0}" = 0 ] || level=all
  ! is_up_to_date "$@" || return 0
  lock_venv
  if [ -e "$venv/.tokamak-made" ] && is_venv_broken; then
    say "$venv is broken: its Python is gone, or an installation was interrupted"
    remove_packages
  fi
  [ -e "$venv/.tokamak-made" ] || make_venv
  if ! is_up_to_date "$@"; then
    SECONDS=0
    install_into_venv "$@"
    say "installed in $SECONDS s"
  fi
  exec {lock}>&-
}

# use_venv [EXTRA]: builds of Paddle for devices have the same files as that for the CPU, so each has an environment of its own.
use_venv() {
  [ -z "${TOKAMAK_VENV:-}" ] || return 0
  case "${1:-}" in gpu | xpu) venv="$root/.venv-$1" build_tools="$root/.venv-$1/build-tools" ;; esac
}

# ---------------------------------------------------------------------------------------------- what options need

# asked NAME VALUE ARGUMENTS...: whether the option has that value on the command line, in the environment or in the file; empty:
# whether it has none.
asked() {
  local name="$1" value="$2" variable="TOKAMAK_${1^^}" file="${TOKAMAK_CONFIG:-}" previous="" argument given="" lines key
  shift 2
  for argument in "$@"; do
    case "$previous $argument" in
      "--$name "*) given="$argument" ;;
      *" --$name="*) given="${argument#*=}" ;;
      "--config "*) file="$argument" ;;
      *" --config="*) file="${argument#*=}" ;;
    esac
    previous="$argument"
  done
  given="${given:-${!variable:-}}"
  if [ -z "$given" ] && [ -f "$file" ]; then
    lines="$(sed -E 's/(^|[[:space:]])#.*//' "$file" | tr '\r\n' '  ')"
    key="(^|[[:space:]{,])[\"']?$name[\"']?[[:space:]]*:"
    if [ -n "$value" ]; then
      grep -qE "$key[[:space:]]*[\"']?$value[\"']?([[:space:],}]|$)" <<<"$lines"
    else
      ! grep -qE "$key" <<<"$lines"
    fi
  else
    [ "$given" = "$value" ]
  fi
}

has_gpu() { [ -e /dev/nvidiactl ] || [ -e /dev/dxg ]; } # the latter where Windows has it (WSL2)

# Whether the device is up to us, and there is a GPU for which an earlier start has installed Paddle.
finds_gpu() {
  [ -e "$root/.venv-gpu/.tokamak-gpu" ] && has_gpu && needs_paddle "$@" &&
    { asked device "" "$@" || asked device auto "$@"; }
}

needs_paddle() { asked ops reference "$@" || asked ops fused "$@"; }

# The extra that options of tools/serve need: a build of Paddle, or the compiler of kernels for NVIDIA's cards; nothing where native
# ops do.
paddle_build() {
  if [ -n "${TOKAMAK_EXTRA:-}" ]; then
    echo "$TOKAMAK_EXTRA"
  elif asked device gpu "$@" && ! needs_paddle "$@"; then
    echo cuda
  elif asked device gpu "$@" || finds_gpu "$@"; then
    echo gpu
  elif asked device xpu "$@"; then
    echo xpu
  elif needs_paddle "$@"; then
    echo cpu
  fi
}
