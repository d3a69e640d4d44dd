"""The examples in the docstrings of the backends, in a process of their own.

Importing a backend makes its framework one of those that a session finds, which tests beside it must not see. The
core's examples are collected with the tests.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_docstring_examples_of_backends_run():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "backends"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
