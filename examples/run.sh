#!/usr/bin/env bash
# The main job, set-up included: one composite model trained with torch and with JAX, compared. See --help.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. .ci/environment.sh
exec python examples/main.py "$@"
