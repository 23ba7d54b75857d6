"""The command of figures 1a and 3: its table, data and picture."""

import pytest

from fgrpo_jax.experiments import figures, tail_miss


def test_it_draws_the_papers_curves(tmp_path, capsys):
    assert tail_miss.main(["--workdir", str(tmp_path)]) == 0
    rows = figures.read_csv(tmp_path / "tail_miss.csv")
    assert len(rows) == 3 * 128 + 3 * 4 * 512
    (row,) = [r for r in rows if (r["mu"], r["rho"], r["n"]) == (0.3, 0.05, 8)]
    assert row["probability"] == pytest.approx(0.82842, abs=1e-5) and row["peak"] == 9
    assert (tmp_path / "tail_miss.png").read_bytes()[:4] == b"\x89PNG"
    assert "0.953" in capsys.readouterr().out  # at mu 0.5, rho 0.01: the highest peak


def test_a_place_that_takes_no_files(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert tail_miss.main(["--workdir", str(tmp_path / "file")]) == 74
    assert "tail_miss.csv: File exists" in capsys.readouterr().err
