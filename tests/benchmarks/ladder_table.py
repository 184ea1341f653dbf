"""Print the ladder as the table of configs/README.md: what each rung trains on, and how its parts relate.

    python tests/benchmarks/ladder_table.py

Every number follows from the configuration alone, and `python launcher/plan.py --config FILE --json` has it.
tests/launcher/runtime/config/test_ladder.py compares configs/README.md with it.
"""

from pathlib import Path

from plumbline.launcher.runtime.config.budget import totals
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.plan import plan_run
from plumbline.launcher.runtime.optim.proportions import best_batch_tokens

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
HEADER = """\
| | parameters | non-embedding | tokens | per parameter | batch | the law's | steps | lr | tau | warm-up |
|---|---|---|---|---|---|---|---|---|---|---|"""


def rungs() -> list[Path]:
    """Return the files of the ladder, the base and then its rungs, the smallest first."""
    found = (CONFIGS / "ladder").glob("*.yaml")
    return [
        CONFIGS / "completep-base.yaml",
        *sorted(found, key=lambda path: load_config(path, [], min).train.tokens or 0),
    ]


def table() -> str:
    """Return the table."""
    return "\n".join([HEADER, *(row(path) for path in rungs())])


def row(path: Path) -> str:
    """Return the line of one rung."""
    config = load_config(path, [], min)
    plan = plan_run(config)
    count, parts = totals(plan.rows), plan.proportions
    assert parts.tau is not None, "the ladder has weight decay"
    cells = (
        path.stem.removeprefix("completep-"),
        f"{count.total / 1e6:,.0f}M",
        f"{count.non_embedding / 1e6:,.0f}M",
        f"{parts.tokens / 1e9:.3g}B",
        f"{parts.tokens_per_parameter:.1f}",
        str(config.data.global_batch_size),
        f"{best_batch_tokens(parts.tokens) / config.data.sequence_length:.0f}",
        f"{plan.total_steps:,}",
        f"{plan.settings.lr:.3g}",
        f"{parts.tau:.3f}",
        f"{parts.warmup_share:.2%}",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(table())
