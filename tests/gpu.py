"""Whether this machine has an NVIDIA GPU, found without a framework, and a fresh process to use it in."""

import subprocess
import sys
from pathlib import Path

import pytest

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not Path("/dev/nvidia0").exists(), reason="no NVIDIA GPU on this machine (/dev/nvidia0)"),
]


def on_gpu(code: str) -> str:
    """Return what a fresh interpreter prints."""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()
