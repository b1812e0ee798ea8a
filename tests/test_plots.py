import json

import numpy as np
from matplotlib.image import imread

from ajgrpo.plots import moving_average, plot_reward_curve


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_the_moving_average_uses_the_values_that_there_are():
    assert moving_average(np.array([1.0, 3.0, 5.0, 7.0]), 3).tolist() == [1.0, 2.0, 3.0, 5.0]
    assert moving_average(np.array([2.0, 4.0]), 1).tolist() == [2.0, 4.0]


def test_the_picture_shows_the_curve(tmp_path):
    rising = write(tmp_path / "rising.jsonl", [{"step": step, "reward": step / 40} for step in range(40)])
    falling = write(tmp_path / "falling.jsonl", [{"step": step, "reward": 1 - step / 40} for step in range(40)])
    pictures = [imread(plot_reward_curve(path, path.with_suffix(".png")))[..., :3] for path in (rising, falling)]
    centres = []
    for picture in pictures:
        assert picture.shape == (540, 960, 3)
        blue = (picture[..., 2] > 0.6) & (picture[..., 0] < 0.3)  # the strong line of the moving average
        rows = np.nonzero(blue[:, : int(0.25 * 960)])[0]
        assert len(rows) > 50
        centres.append(rows.mean())
    # Rows count from the top: a rising curve starts low in the picture.
    assert centres[0] > 300 > 240 > centres[1]


def test_windows_without_a_reward_are_left_out(tmp_path):
    records = [{"step": 1, "loss": 1.0}, {"step": 2, "reward": None}]
    assert plot_reward_curve(write(tmp_path / "m.jsonl", records), tmp_path / "m.png") is None
    assert not (tmp_path / "m.png").exists()
    path = write(tmp_path / "n.jsonl", [*records, {"step": 3, "reward": 0.5}])
    assert plot_reward_curve(path, tmp_path / "n.png") == tmp_path / "n.png"
    assert (tmp_path / "n.png").stat().st_size > 0
