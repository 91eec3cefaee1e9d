#!/usr/bin/env bash
# Makes .venv hold exactly what requirements/dev.lock pins, and this project, editable.
#
#   scripts/setup.sh          what the demo, the benchmarks and the checks need
#   scripts/setup.sh tests    also what the tests need from Debian
#
# A stamp in .venv holds what the last complete run was made from, so running again costs nothing, and an interrupted run
# is simply done again. PYTHON names another interpreter than the first of python3.11, python3.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*" >&2; }
die() {
    say "$@"
    exit 1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3}; do
        # The real path, since an activated .venv must not be made from itself.
        "$candidate" -c '
import os, platform, sys
if sys.version_info < (3, 11):
    sys.exit(1)
print(os.path.realpath(sys.executable), platform.python_version())' 2>/dev/null && return
    done
    die "found no Python 3.11 or newer among: ${PYTHON:-python3.11 python3}. Install one, or name it in PYTHON."
}

install_environment() {
    local interpreter=$1 place=$2 stamp=$3
    # A virtual environment that was moved, or made by another interpreter, runs the wrong one: make it anew. One without
    # a stamp was interrupted: go on with it.
    if [[ ! -x .venv/bin/python ]] || [[ -e .venv/.setup && "$(head -n 1 .venv/.setup)" != "$place" ]]; then
        say "making the virtual environment .venv with $interpreter"
        "$interpreter" -m venv --clear .venv
    fi
    rm -f .venv/.setup
    say "installing $(grep -c '==' requirements/dev.lock) pinned packages from requirements/dev.lock (a minute or two)"
    # Twice quiet: errors only.
    .venv/bin/python -m pip install -qq --disable-pip-version-check --no-deps --requirement requirements/dev.lock
    say "installing ckptstore itself, editable"
    .venv/bin/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation --editable .
    .venv/bin/python -m pip check --quiet --disable-pip-version-check >&2
    printf '%s\n' "$stamp" >.venv/.setup
    say "done: .venv/bin holds python, ckptstore and the tools"
}

install_from_debian() {
    command -v strace >/dev/null && return
    if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
        die "the crash tests need strace, which is not installed: install it (on Debian: sudo apt-get install strace)"
    fi
    say "installing strace from Debian, for the crash tests"
    export DEBIAN_FRONTEND=noninteractive
    apt-get -qq install --yes --no-install-recommends strace >&2 || {
        apt-get -qq update >&2
        apt-get -qq install --yes --no-install-recommends strace >&2
    }
}

found=$(find_python)
place="$PWD $found"
stamp="$place
$(sha256sum requirements/dev.lock pyproject.toml)"
if [[ ! -e .venv/.setup || "$(cat .venv/.setup)" != "$stamp" ]]; then
    install_environment "${found% *}" "$place" "$stamp"
fi
if [[ ${1:-} == tests ]]; then
    install_from_debian
fi
