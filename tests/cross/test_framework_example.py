"""The example that a user would copy: two GPTs proved equal over five topologies, and each fault found where it is."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_two_gpts_are_equal_over_five_topologies_and_faults_are_found():
    command = "-m pytest -q -p no:cacheprovider -s examples/cross_framework_test.py"
    ended = subprocess.run([sys.executable, *command.split()], capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "10 passed" in ended.stdout
    assert ended.stdout.count("first difference: layers.") == 5
