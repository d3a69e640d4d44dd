#!/usr/bin/env bash
# Every check of the project, set-up included: lint, format, types, tests. Arguments go to pytest.
# Two lanes of test files: while one waits for processes to meet, or compiles on one core, the other computes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. .ci/environment.sh

echo "ruff, mypy"
ruff check .
ruff format --check --quiet .
mypy
# JAX compiles thousands of programs that run once: leave out the passes that only make them faster.
export JAX_DISABLE_MOST_OPTIMIZATIONS=1
python -m pytest -n 2 --dist loadfile "$@"
