"""Every Python block of the README and the docs runs, each in a fresh process, with warnings as errors."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import dualmesh as dm

ROOT = Path(__file__).parent.parent
STARTS = {"start_torch.md": ("jax", "jaxlib", "flax"), "start_jax.md": ("torch", "accelerate")}
"""Pages that run where the other framework is absent."""
DOCUMENTS = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").glob("*.md") if path.name not in STARTS)]
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


HIDDEN = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent}:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Absent())
"""


def block_of(name):
    """Return the first Python block of a page."""
    return re.search(r"^```python\n(.*?)^```$", (ROOT / "docs" / name).read_text(), re.MULTILINE | re.DOTALL)[1]


@pytest.mark.parametrize(("page", "absent"), STARTS.items())
def test_the_first_ten_minutes_need_no_other_framework(page, absent):
    """Both frameworks together are there where the README's blocks run."""
    code = [sys.executable, "-W", "error", "-c", HIDDEN.format(absent=absent) + block_of(page)]
    ended = subprocess.run(code, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert re.findall(r"step (\d): loss \d", ended.stdout) == ["0", "1", "2"]


def test_the_docs_build_without_a_warning(tmp_path):
    """Sphinx reads every page and every public docstring."""
    build = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", tmp_path / "trees", ROOT / "docs"]
    ended = subprocess.run([*build, tmp_path / "pages"], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    pages = {page.name for page in (tmp_path / "pages").glob("*.html")}
    assert {f"{page.stem}.html" for page in (ROOT / "docs").glob("*.md")} <= pages
    reference = (tmp_path / "pages" / "api.html").read_text()
    homes = ('id="dualmesh.{}"', 'id="module-dualmesh.{}"', 'id="dualmesh.errors.{}"')
    assert [name for name in dm.__all__ if not any(home.format(name) in reference for home in homes)] == []
