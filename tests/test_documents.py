"""Every Python block of the README and the docs runs, each in a fresh process, with warnings as errors."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{document.name}-{number}")
    for document in DOCUMENTS
    for number, block in enumerate(
        re.findall(r"^```python\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL)
    )
]


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(block):
    ended = subprocess.run([sys.executable, "-W", "error", "-c", block], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr


def test_readme_opens_with_the_two_commands():
    first = re.search(r"^```bash\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert [line.split("#")[0].strip() for line in first[1].splitlines()] == [
        "bash examples/run.sh",
        "bash tests/run.sh",
    ]
