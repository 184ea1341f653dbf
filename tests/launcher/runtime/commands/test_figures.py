"""Figures without a window: their sizes, their colours, and nobody who keeps them."""

from pathlib import Path

from matplotlib.image import imread

from plumbline.launcher.runtime.commands.figures import DPI, panels, save_png, shades

LAUNCHER = Path(__file__).resolve().parents[4] / "launcher"


def test_a_figure_has_the_size_of_its_panels_and_its_margin(tmp_path: Path) -> None:
    figure, grid = panels(2, 3, (1.5, 1.0), margin=(0.5, 0.25), sharex=True)
    assert grid.shape == (2, 3)
    grid[0, 0].set_xlim(0, 7)
    assert grid[1, 0].get_xlim() == (0, 7)
    save_png(figure, tmp_path / "figure.png")
    height, width, _ = imread(tmp_path / "figure.png").shape
    assert (width, height) == (5.0 * DPI, 2.25 * DPI)
    assert [path.name for path in tmp_path.iterdir()] == ["figure.png"]


def test_shades_differ_and_begin_dark() -> None:
    lightness = shades(5)[:, :3].sum(-1)
    assert sorted(lightness) == list(lightness)
    assert len(set(lightness)) == 5
    assert shades(1).shape == (1, 4)


def test_nobody_draws_with_pyplot() -> None:
    """It would keep every figure that is not closed, and a long sweep would run out of memory."""
    assert not [path for path in LAUNCHER.rglob("*.py") if "import pyplot" in path.read_text()]
