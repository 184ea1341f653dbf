"""What a sweep's file means: which cells, which of them are one run, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from plumbline.launcher.runtime.commands import cli
from plumbline.launcher.runtime.config.errors import ConfigError
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.parse import parse
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.sweep.cells import Cell, _signature, distinct
from plumbline.launcher.runtime.sweep.config import load_sweep
from plumbline.launcher.runtime.sweep.plan import Plan, load_plan, make_plan, save_plan
from plumbline.launcher.runtime.sweep.results import describe
from plumbline.launcher.runtime.system.exit_codes import UNREACHED, UNUSABLE

REPOSITORY = Path(__file__).resolve().parents[4]
SWEEPS = sorted((REPOSITORY / "configs" / "sweeps").glob("*.yaml"))

# tiny.yaml has width 64, depth 2 and the base 32, 1; here the base is what the cells say
SWEEP: dict[str, Any] = {
    "name": "small",
    "set": {"parameterization.base_hidden_size": 64, "parameterization.base_num_hidden_layers": 2, "train.steps": 30},
    "seeds": [1, 7],
    "grids": [
        {
            "axes": {
                "rule": {rule: {"parameterization.rule": rule} for rule in ("sp", "mup", "completep")},
                "size": {
                    "base": {},
                    "wide": {"model.hidden_size": 128, "model.num_attention_heads": 4},
                    "deep": {"model.num_hidden_layers": 4},
                },
                "optimizer.lr": [0.001, 0.004],
            }
        },
        {"axes": {"optimizer.betas": [[0.9, 0.99]]}},
    ],
}


def write(folder: Path, base_file: Path, **changes: Any) -> Path:
    """Write a sweep's file; changes to None take a key away."""
    sweep = {**SWEEP, "root": str(folder / "sweeps"), "base": str(base_file), **changes}
    file = folder / "sweep.yaml"
    file.write_text(yaml.safe_dump({key: value for key, value in sweep.items() if value is not None}, sort_keys=False))
    return file


@pytest.fixture(scope="module")
def plan(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return make_plan(write(tmp_path_factory.mktemp("sweep"), tiny_config), ["data.micro_batch_size=4"])


def find(cells: list[Cell], **labels: Any) -> Cell:
    """Return the one cell with these labels and seed 1."""
    (cell,) = [cell for cell in cells if labels.items() <= cell.labels.items() and cell.config.run.seed == 1]
    return cell


def test_the_cells_are_the_union_of_the_products_for_each_seed(plan: Plan) -> None:
    assert len(plan.cells) == (3 * 3 * 2 + 1) * 2
    assert [cell.config.run.seed for cell in plan.cells[:4]] == [1, 7, 1, 7]
    wide = find(plan.cells, rule="mup", size="wide", **{"optimizer.lr": 0.004}).config
    assert (wide.parameterization.rule, wide.model.hidden_size, wide.model.num_attention_heads) == ("mup", 128, 4)
    assert (wide.optimizer.lr, wide.train.steps, wide.data.micro_batch_size) == (0.004, 30, 4)
    assert (wide.model.num_hidden_layers, wide.optimizer.betas) == (2, [0.9, 0.95]), "not those of other cells"
    assert find(plan.cells, **{"optimizer.betas": [0.9, 0.99]}).config.optimizer.betas == [0.9, 0.99]
    assert str(plan.cells[1]) == "rule=sp size=base optimizer.lr=0.001 seed=7"
    assert wide.run.folder == plan.sweep.folder / "runs" / wide.run.name


def test_without_a_root_a_sweep_lies_where_the_runs_of_its_base_do(tiny_config: Path, tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text(f"extends: {tiny_config}\nrun: {{root: /scratch/me}}\n")
    assert load_sweep(write(tmp_path, base, root=None)).folder == Path("/scratch/me/sweeps/small")
    assert load_sweep(write(tmp_path, base, root="here")).folder == Path("here/small")
    base.write_text(f"extends: {tiny_config}\nrun: {{root: null}}\n")
    assert load_sweep(write(tmp_path, base, root=None)).folder == Path("runs/sweeps/small"), (
        "who reads the base says it"
    )


def test_a_cell_that_several_grids_have_is_there_once(tiny_config: Path, tmp_path: Path) -> None:
    """Twice, it would count as two seeds: the error of a mean would be too small."""
    grids = [{"axes": {"optimizer.lr": rates}} for rates in ([1e-3, 2e-3, 2e-3], [2e-3, 4e-3])]
    cells = make_plan(write(tmp_path, tiny_config, grids=grids), []).cells
    assert [(cell.labels["optimizer.lr"], cell.config.run.seed) for cell in cells] == [
        (rate, seed) for rate in (1e-3, 2e-3, 4e-3) for seed in (1, 7)
    ]


def test_a_value_inside_of_a_list_holds_wherever_the_list_is_given(
    tiny_config: Path, corpus: Path, tmp_path: Path
) -> None:
    """A list that came last would take back the weights, and cells with other labels would be one run."""
    sources = [{"path": str(corpus)}, {"task": {"name": "addition", "digits": 2}}]
    axes = {
        "data.train.0.weight": [0.5, 2.0],
        "mix": {"one": {"data.train": sources[:1]}, "two": {"data.train": sources}},
    }
    file = write(tmp_path, tiny_config, set={"data.train.0.max_epochs": 3.0}, seeds=[1], grids=[{"axes": axes}])
    cells = make_plan(file, ["data.train[0].weight_changes=[{tokens: 4096, weight: 1}]"]).cells
    assert len(distinct(cells)) == len(cells) == 4
    for cell in cells:
        first = cell.config.data.train[0]
        assert (first.weight, first.max_epochs) == (cell.labels["data.train.0.weight"], 3.0)
        assert [change.tokens for change in first.weight_changes] == [4096]


def test_rules_that_do_the_same_share_a_run(plan: Plan) -> None:
    def signatures(size: str) -> dict[str, str]:
        lr = {"optimizer.lr": 0.001}
        return {rule: find(plan.cells, rule=rule, size=size, **lr).signature for rule in ("sp", "mup", "completep")}

    base, wide, deep = signatures("base"), signatures("wide"), signatures("deep")
    assert len(set(base.values())) == 1, "at the base all rules coincide"
    assert wide["mup"] == wide["completep"] != wide["sp"], "at the base's depth CompleteP is muP"
    assert deep["sp"] == deep["mup"] != deep["completep"], "at the base's width muP is SP"
    # 3 sizes x 2 learning rates x 2 seeds; twice where two rules differ; and the other betas with 2 seeds
    assert len(plan.runs) == (1 + 2 + 2) * 2 * 2 + 2
    assert {cell.signature for cell in plan.runs} == {cell.signature for cell in plan.cells}


def test_the_longest_runs_come_first(plan: Plan) -> None:
    flops = [cell.flops for cell in plan.runs]
    assert flops == sorted(flops, reverse=True)
    assert plan.runs[0].labels["size"] == "wide"
    assert plan.runs == distinct(list(reversed(plan.cells))) or plan.runs == distinct(plan.cells)


@pytest.mark.parametrize(
    ("override", "same"),
    [
        ("checkpoint.interval=3", True),
        ("metrics.trackers=[tensorboard]", True),
        ("horizon.rule=none", True),
        ("parameterization.base_head_dim=32", True),
        ("parameterization.gamma_0=2.0", False),
        ("optimizer.weight_decay=0.2", False),
        ("horizon.tau=0.5", False),
        ("schedule.warmup=3steps", False),
        ("train.steps=31", False),
        ("data.global_batch_size=4", False),
        ("data.micro_batch_size=4", False),
        ("run.deterministic=false", True),
        ("run.deterministic=true", False),
        ("run.reproducible=any_ranks", False),
    ],
)
def test_a_run_is_what_determines_its_numbers(tiny_config: Path, tmp_path: Path, override: str, same: bool) -> None:
    file = write(tmp_path, tiny_config, grids=[{"axes": {"optimizer.lr": [0.001]}}], seeds=[1])
    before, after = (make_plan(file, overrides).runs[0].signature for overrides in ([], [override]))
    assert (before == after) is same


def test_runs_of_a_coordinate_check_are_its_own_and_other_kinds_share_theirs(tiny_config: Path, tmp_path: Path) -> None:
    curves: dict[str, dict[str, Any]] = {
        "grid": {},
        "comparison": {"comparison": {"variants": "rule"}},
        "coordinate_check": {"coordinate_check": {"curves": "rule"}},
    }
    grids = [{"axes": {"rule": {"mup": {"parameterization.rule": "mup"}}}}]
    found = {}
    for kind, settings in curves.items():
        file = write(tmp_path, tiny_config, kind=kind, grids=grids, seeds=[1], **settings)
        (found[kind],) = (cell.signature for cell in make_plan(file, []).cells)
    assert found["grid"] == found["comparison"] != found["coordinate_check"]


def test_what_makes_a_run_repeatable_reaches_its_cells(tiny_config: Path, tmp_path: Path) -> None:
    given = {**SWEEP["set"], "run.deterministic": True}
    cells = make_plan(write(tmp_path, tiny_config, set=given), ["run.reproducible=any_ranks"]).cells
    assert {(cell.config.run.deterministic, cell.config.run.reproducible) for cell in cells} == {(True, "any_ranks")}
    assert {cell.config.run.seed for cell in cells} == {1, 7}


def test_another_text_in_the_same_place_is_another_run(tiny_config: Path, corpus: Path, tmp_path: Path) -> None:
    copy = tmp_path / "corpus"
    shutil.copytree(corpus, copy)
    file = write(tmp_path, tiny_config, grids=[{"axes": {"optimizer.lr": [0.001]}}], seeds=[1])
    given = [f"data.train=[{{path: {copy}}}]"]
    first = make_plan(file, given).runs[0].signature
    manifest = json.loads((copy / "corpus.json").read_text())
    manifest["files"]["train.bin"]["xxh3_64"] = "0" * 16
    (copy / "corpus.json").write_text(json.dumps(manifest))
    assert make_plan(file, given).runs[0].signature != first


def test_a_saved_plan_is_the_plan(plan: Plan, tmp_path: Path) -> None:
    some = Plan(plan.sweep, plan.cells, plan.runs[3:])
    save_plan(some, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == some
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read as the plan of a sweep"):
        load_plan(tmp_path / "plan.json")


@pytest.mark.parametrize(("job", "expected"), [(None, UNUSABLE), ("7", UNREACHED)])
def test_a_plan_that_the_disk_cannot_read_does_not_end_a_job_for_good(
    monkeypatch: pytest.MonkeyPatch, job: str | None, expected: int
) -> None:
    """Linux reads nothing but an I/O error at the start of this file, as from a network disk that is away."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if job is not None:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    assert cli.code_of(lambda: len(load_plan(Path("/proc/self/mem")).runs)) == expected


def one_axis_at_a_time(axes: dict[str, Any]) -> list[dict[str, Any]]:
    """Return grids in which one axis takes all of its values and the others their first: all are read, few products."""
    first = {
        name: dict(list(values.items())[:1]) if isinstance(values, dict) else values[:1]
        for name, values in axes.items()
    }
    return [{"axes": {**first, name: values}} for name, values in axes.items()]


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_sweep_in_the_repository_makes_a_plan(path: Path, corpus: Path, tmp_path: Path) -> None:
    """One seed; of plain grids, which nothing reads as a whole, not every product."""
    sweep = yaml.safe_load(path.read_text(encoding="utf-8"))
    if "kind" not in sweep:
        sweep["grids"] = [thin for grid in sweep["grids"] for thin in one_axis_at_a_time(grid["axes"])]
    file = tmp_path / path.name
    file.write_text(yaml.safe_dump({**sweep, "base": str(path.parent / sweep["base"])}, sort_keys=False))
    on_text = "corpora/" in path.read_text(encoding="utf-8")
    given = [f"data.train=[{{path: {corpus}, max_epochs: 1000000}}]"] if on_text else []
    plan = make_plan(file, given, seeds=sweep.get("seeds", [1])[:1])
    assert plan.runs
    plan.sweep.how.check(plan.sweep.settings, [describe(cell) for cell in plan.cells])
    assert load_config(path.parent / plan.sweep.base, ["model.vocab_size=257"]).run.name


def test_a_sweep_can_be_run_seed_by_seed() -> None:
    path = Path("configs/sweeps/lookahead_star.yaml")
    whole, some = make_plan(path, []), make_plan(path, [], seeds=[3, 1])
    assert {cell.config.run.seed for cell in some.runs} == {1, 3}
    assert {cell.signature for cell in some.runs} < {cell.signature for cell in whole.runs}
    assert len(some.runs) == len(whole.runs) * 2 / 3
    assert some.cells == whole.cells
    with pytest.raises(ConfigError, match=r"--seeds 4: configs/sweeps/lookahead_star.yaml has the seeds \[1, 2, 3\]"):
        make_plan(path, [], seeds=[4])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"knd": "grid"}, "knd = 'grid': unknown key; did you mean kind?"),
        ({"kind": "grids"}, "kind = 'grids': known kinds are grid, comparison"),
        ({"name": "a/b"}, "name = 'a/b'"),
        ({"base": None}, "base: missing"),
        ({"seeds": [1, 2, 1]}, "seeds = [1, 2, 1]: one is there twice"),
        ({"set": {"run.seed": 3}}, "set: run.seed is set by the sweep for each cell"),
        ({"set": {"optimizer.lrr": 3}}, "cell rule=sp size=base optimizer.lr=0.001: "),
        ({"set": {"optimizer.lrr": 3}}, "optimizer.lrr = 3: unknown key; did you mean lr?"),
        ({"set": {"data.train": [{"path": "nowhere"}]}}, "nowhere"),
        (
            {"set": {"schedule.warmup": "30 steps"}},
            "cell rule=sp size=base optimizer.lr=0.001: schedule.warmup = 30 steps",
        ),
        ({"set": {"schedule.branch": {"checkpoint": "runs/a", "steps": 5}}}, "start each branch by pretrain.py"),
        ({"grids": []}, "grids = []"),
        ({"optimizer.lr": 0.001}, "optimizer.lr belongs under set:, for all cells, or into the axes of an entry"),
        ({"grids": [{"axes": {"lr": [1]}}]}, "lr = [1]: an axis with a list of values is a config key"),
        ({"grids": [{"axes": {"optimizer.lr": 0.001}}]}, "optimizer.lr = 0.001: an axis is a list of values"),
        ({"grids": [{"axes": {"optimizer.lr": []}}]}, "optimizer.lr = []: an axis is a list of values"),
        ({"grids": [{"axes": {"size": {"a": 64}}}]}, "size = {'a': 64}: an axis is a list of values"),
        (
            {"grids": [{"axes": {"optimizer.lr": [1], "fast": {"yes": {"optimizer.lr": 2}}}}]},
            "axes optimizer.lr and fast both set optimizer.lr",
        ),
        ({"grids": [{"axes": {"run.seed": [1]}}]}, "axes: run.seed is set by the sweep for each cell"),
        (
            {"grids": [{"axes": {"size": {"a": {"model.num_hidden_layers": depth}}}} for depth in (2, 4)]},
            "cell size=a seed=1: two grids make different runs of these labels",
        ),
        ({"kind": "lr_transfer"}, "lr_transfer: missing"),
        ({"lr_transfer": {"curves": "rule"}}, "lr_transfer: settings of another kind than this sweep's, grid"),
        (
            {"set": {"optimizer.lr": 5.0}, "grids": [{"axes": {"optimizer.lr": [1]}}]},
            "set: optimizer.lr is an axis of every grid, too",
        ),
        ({"kind": "lr_transfer", "lr_transfer": {"curve": "rule"}}, "lr_transfer.curve = 'rule': unknown key"),
    ],
)
def test_a_mistake_is_named_before_anything_runs(
    tiny_config: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        make_plan(write(tmp_path, tiny_config, **changes), [])
    assert words in str(caught.value)
    assert not (tmp_path / "sweeps").exists()


def test_a_section_is_written_key_by_key(tiny_config: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set: train is a section: write its keys with their paths, train\.steps"):
        make_plan(write(tmp_path, tiny_config, set={"train": {"steps": 6}}), [])


def test_a_value_for_all_cells_may_not_be_an_axis(tiny_config: Path, tmp_path: Path) -> None:
    file = write(tmp_path, tiny_config)
    with pytest.raises(ConfigError, match=r"optimizer.lr=1: the axis optimizer.lr sets optimizer.lr"):
        make_plan(file, ["optimizer.lr=1"])
    with pytest.raises(ConfigError, match=r"run.name=x: run.name is set by the sweep"):
        make_plan(file, ["run.name=x"])


def test_what_a_sweep_says_of_the_environment_is_text(
    tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "hidden")
    given = {"metrics.project": r"\${oc.env:SECRET}"}
    grids: list[dict[str, Any]] = [{"axes": {"optimizer.lr": [1]}}, {"axes": {"metrics.project": [r"\\\${oc.env:A}"]}}]
    one, other = make_plan(write(tmp_path, tiny_config, set=given, grids=grids, seeds=[1]), []).cells
    assert one.config.metrics.project == "${oc.env:SECRET}"
    assert other.config.metrics.project == r"\${oc.env:A}"
    hidden = {"metrics.project=${oc.env:SECRET} #": 1}
    for changes in ({"set": hidden}, {"grids": [{"axes": {"size": {"a": hidden}}}]}):
        with pytest.raises(ConfigError, match=r"metrics.project=\$\{oc.env:SECRET\} #: not a key"):
            make_plan(write(tmp_path, tiny_config, **changes), [])


@pytest.mark.parametrize("text", ["[1, 2]", "name: {x", "\x00"])
def test_what_is_not_a_sweep_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"bad.yaml: "):
        load_sweep(file)
    with pytest.raises(ConfigError, match=r"no such file; .* holds .*bad.yaml"):
        load_sweep(tmp_path / "good.yaml")


@pytest.mark.parametrize(
    ("schedule", "signature"),
    [
        ({}, "921e2ff193a35865"),
        ({"warmup": "2 steps"}, "9bd510ac62addbe5"),
        ({"warmup": "10%", "decay": "256 tokens"}, "a9a7d47365af0f43"),
    ],
)
def test_runs_made_when_a_duration_had_a_key_for_each_unit_are_still_known(
    schedule: dict[str, Any], signature: str
) -> None:
    """The hashes are those of commit 04f38c2."""
    values = {
        "run": {"name": "small"},
        "model": {"vocab_size": 257, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
        "parameterization": {"rule": "sp"},
        "data": {"train": [{"path": "nowhere"}], "sequence_length": 32, "global_batch_size": 8, "micro_batch_size": 2},
        "optimizer": {"lr": 1e-3},
        "schedule": schedule,
        "train": {"steps": 10},
    }
    assert _signature(parse(Config, values, "here"), {"seed": 1, "effect": {}, "corpora": {}}) == signature
