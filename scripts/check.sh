#!/usr/bin/env bash
# Runs every check that needs no test run: lint, format, types, import rules. All of them, then fails if one did.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH" PYRIGHT_PYTHON_IGNORE_WARNINGS=1

failed=()
check() {
    printf '== %s\n' "$*"
    "$@" || failed+=("$*")
}

check ruff check .
check ruff format --check .
check mypy ckptstore backends tests benchmarks
check pyright tests/typing/api.py
check lint-imports --no-logo

if ((${#failed[@]})); then
    printf 'failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
