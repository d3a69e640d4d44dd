#!/usr/bin/env bash
# The suite's core in one environment per cell (a framework or numpy, its version, a Python), and docs/versions.md from it.
# Arguments name cells, or parts of their names (torch, jax-newest, py3.13); none: all. --list names them, runs nothing.
# DUALMESH_MATRIX chooses the folder of the environments (some GB for torch), PYTHON an interpreter beside those found.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-$(command -v python3.11 || command -v python3)}
exec "$python" -m tests.matrix "$@"
