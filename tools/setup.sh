# Makes .venv with this checkout installed into it, or finds it up to date. Sourced by tools/serve and tools/test.
#
#   setup EXTRA...    extras of pyproject.toml that are needed, such as: setup cpu test
#
# TOKAMAK_VENV    where the environment is (default: .venv in the checkout)
# TOKAMAK_PYTHON  the interpreter it is made with (default: the first of python3, python3.13 ... python3.10 that will do)

set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${TOKAMAK_VENV:-$root/.venv}"

say() { printf 'tokamak: %s\n' "$*" >&2; }

fail() {
  say "error: $*"
  exit 1
}

# An interpreter that Paddle has wheels for.
find_python() {
  local candidate
  for candidate in ${TOKAMAK_PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  fail "no Python 3.10 to 3.13 found (python3 is $(python3 --version 2>&1 || true)); install one, or name it with TOKAMAK_PYTHON"
}

# What an installation depends on. Python sources are used in place, so they are not part of it.
fingerprint() {
  (
    cd "$root"
    find pyproject.toml CMakeLists.txt ./*/native -type f \( -name '*.toml' -o -name '*.txt' -o -name '*.cpp' -o -name '*.h' -o -name '*.inc' \) -print0 |
      LC_ALL=C sort -z | xargs -0 sha256sum
    echo "$root" "$venv" # scripts in it name both
    "$venv/bin/python" --version
  ) | sha256sum | cut -d' ' -f1
}

is_installed() {
  local extra now
  now="$(fingerprint)"
  for extra in "$@"; do
    [ "$(cat "$venv/.tokamak-$extra" 2>/dev/null)" = "$now" ] || return 1
  done
}

make_venv() {
  local python
  python="$(find_python)"
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python cannot make virtual environments; install its venv module (Debian, Ubuntu: apt install python3-venv)"
  say "making $venv with $("$python" --version)"
  "$python" -m venv "$venv"
  touch "$venv/.tokamak-made"
}

install_into_venv() {
  local extra extras quiet=()
  extras="$(IFS=, && echo "$*")"
  command -v c++ >/dev/null || command -v g++ >/dev/null ||
    fail "no C++ compiler found; the shared-memory module needs one (Debian, Ubuntu: apt install g++)"
  [ -t 2 ] || quiet=(--quiet)
  say "installing with [$extras]; the first time this downloads Paddle and takes a few minutes"
  "$venv/bin/python" -m pip install "${quiet[@]}" --disable-pip-version-check --editable "$root[$extras]" >&2 ||
    fail "pip could not install tokamak[$extras]; its messages are above"
  for extra in "$@"; do
    fingerprint >"$venv/.tokamak-$extra"
  done
}

# One setup at a time; the second finds everything done.
setup() {
  local lock
  mkdir -p "$venv"
  exec {lock}>"$venv/.tokamak-lock"
  ! command -v flock >/dev/null || flock "$lock"
  [ -e "$venv/.tokamak-made" ] || make_venv
  is_installed "$@" || install_into_venv "$@"
  exec {lock}>&-
}
