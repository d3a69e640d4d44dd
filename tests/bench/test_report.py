"""`python -m tests.bench` writes what its benches found as a table, as data and as a plot."""

import json
import os
import subprocess
import sys

import pytest

from tests.bench import report, timing


def test_table_data_and_plot_are_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DUALMESH_BENCH_ROWS", str(tmp_path / "rows"))
    timing.table("scopes", {"by hand": 2e-7, "ours": 3e-7}, {"ours": "by hand"})
    rows = [report.Row(**json.loads(line)) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [row.ratio for row in rows] == [None, pytest.approx(1.5)]
    report.write(rows, report.machine(), tmp_path)
    text = (tmp_path / "bench.md").read_text()
    assert "| scopes: ours | 300 ns | by hand: 200 ns | 1.50 |" in text
    assert "| scopes: by hand |" not in text  # a floor stands beside what it is the floor of
    assert json.loads((tmp_path / "bench.json").read_text())["rows"][1]["ratio"] == pytest.approx(1.5)
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_a_bench_that_is_not_there_is_named():
    command = [sys.executable, "-m", "tests.bench", "ambiant"]
    ended = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), timeout=120)
    assert ended.returncode == 2
    assert "no bench ambiant. Benches: ambient, collectives" in ended.stderr
