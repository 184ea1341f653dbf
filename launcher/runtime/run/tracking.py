"""Open the trackers of a run: what its configuration asks for, and what they learn of it."""

from plumbline.launcher.runtime.config.identity import settings
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.trackers import TRACKERS
from plumbline.launcher.runtime.trackers.feed import Feed, History
from plumbline.launcher.runtime.trackers.kind import TrackedRun


def open_feeds(config: Config, history: History) -> list[Feed]:
    """Return what hands the lines of metrics.jsonl to each of `metrics.trackers`."""
    run = TrackedRun(config.run.folder, config.metrics.project, config.model_dump(mode="json"), settings(config))
    return [Feed(name, TRACKERS[name], run, history) for name in dict.fromkeys(config.metrics.trackers)]
