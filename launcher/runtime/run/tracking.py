"""Open the trackers that a run's configuration asks for, and describe the run to them."""

from plumbline.launcher.runtime.config.identity import settings
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.trackers import TRACKERS
from plumbline.launcher.runtime.trackers.feed import Feed, History
from plumbline.launcher.runtime.trackers.kind import TrackedRun


def open_feeds(config: Config, history: History) -> list[Feed]:
    """Return the feeds that send the lines of metrics.jsonl to each of `metrics.trackers`."""
    run = TrackedRun(config.run.folder, config.metrics.project, config.model_dump(mode="json"), settings(config))
    return [Feed(name, TRACKERS[name], run, history) for name in dict.fromkeys(config.metrics.trackers)]
