"""`make quickstart` on machines of any size."""

from plumbline.launcher.quickstart import CONFIG, rank_count
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.system.installation import ROOT


def test_any_number_of_devices_shares_the_batch() -> None:
    """Half of them are used at least, as long as there are sequences for more."""
    data = load_config(ROOT / CONFIG, ["model.vocab_size=256"]).data
    for devices in range(1, 65):
        ranks = rank_count(devices)
        assert devices >= ranks > min(devices, data.global_batch_size) / 2
        assert data.accumulation_steps(ranks) * data.micro_batch(ranks) * ranks == data.global_batch_size
