"""Start a run from the weights of a stock Hugging Face model (train.initialize_from), for continued pretraining.

The model section must match the folder; if left out, it is taken from there. Before its first step the run computes the
folder's function, whatever the parameterization's multipliers (model/export/from_stock.py). A run with latent lookahead
thinks as an exported folder does. A resume continues from the run's own checkpoints and does not read the folder again.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from plumbline.data.damage import DamagedFileError, reading
from plumbline.data.hub import is_reachable
from plumbline.data.tokenizers import FILES as TOKENIZER_FILES
from plumbline.data.tokenizers import holds_tokenizer
from plumbline.launcher.runtime.checkpoint.store import checkpoints
from plumbline.launcher.runtime.checkpoint.weights import read_weights
from plumbline.launcher.runtime.config.run_files import CHECKPOINTS
from plumbline.launcher.runtime.config.schema import Config
from plumbline.launcher.runtime.config.stock import (
    FILES,
    HUB,
    WEIGHTS,
    hub_folder,
    section_of,
    stock_entries,
)
from plumbline.launcher.runtime.models.finite import check_finite
from plumbline.launcher.runtime.models.open import load_tokenizer
from plumbline.launcher.runtime.ranks.collectives import gather_objects
from plumbline.launcher.runtime.ranks.world import World
from plumbline.launcher.runtime.run.inputs import Inputs
from plumbline.launcher.runtime.system.log import LOG, TRAINING
from plumbline.model.attention import attention_kind
from plumbline.model.export import thinker
from plumbline.model.export.fold import Weights
from plumbline.model.export.from_stock import check_skip, from_stock
from plumbline.model.objectives.latent_lookahead import LatentLookaheadConfig
from plumbline.model.parameterization.multipliers import multipliers
from plumbline.model.parameterization.skeleton import parameter_shapes
from plumbline.model.stock_inputs import DOCUMENT_MASK

PROBE = "A fox, 2 quick brown dogs: don't x[10] == {y};\n\tünïcödé, русский, 日本語"
"""Text that two tokenizers must encode alike to count as the same; added tokens and templates may differ."""


def check(config: Config) -> None:
    """Refuse a folder of another model, before any weight is read. A run with checkpoints no longer needs the folder.

    Raises:
        ValueError: names every key of the model section that differs, or a skip gain that the parameterization changes.
    """
    spec = _asked_for(config)
    if spec is None:
        return
    section = section_of(spec)
    # A run may add a kind of attention to a model trained without it, and learn the new parts
    grafted = {"attention"} if attention_kind(config.model).grafted else set()
    longer = {"max_position_embeddings"} if config.model.position_embedding == "rope" else set()
    free = {"family", DOCUMENT_MASK} | grafted | longer
    given = config.model.model_dump()
    lines = [
        f"  model.{key}: {given[key]!r}, there {value!r}"
        for key, value in section.items()
        if key not in free and given[key] != value
    ]
    if lines:
        raise ValueError(
            f"train.initialize_from = {spec} is another model; set these keys to its values, or give model=null to "
            "take them all from there:\n" + "\n".join(lines)
        )
    try:
        check_skip(config.model, multipliers(config.model, config.parameterization))
    except ValueError as error:
        raise ValueError(f"train.initialize_from = {spec}: {error}") from error


def check_tokenizer(config: Config, inputs: Inputs) -> None:
    """Refuse corpora whose token ids have a different meaning in the model from which training starts.

    Without a tokenizer in either, this cannot be checked; if one cannot be read, warn.

    Raises:
        ValueError: the two encode a text differently.
    """
    spec = _asked_for(config)
    own = next((corpus.tokenizer_path for corpus in inputs.train.corpora.values() if corpus.tokenizer_path), None)
    if spec is None or own is None:
        return
    source = f"train.initialize_from = {spec}"
    try:
        folder = Path(spec) if not spec.startswith(HUB) else hub_folder(spec, TOKENIZER_FILES)
        if not holds_tokenizer(folder):
            return
        theirs, ours = (load_tokenizer(each).encode(PROBE, add_special_tokens=False) for each in (folder, own))
        if not theirs:
            raise ValueError(f"{folder}: its tokenizer knows no word")  # it lacks its vocabulary
    except (ValueError, OSError) as error:
        LOG.warning(f"{source}: whether the corpora were made with its tokenizer cannot be told ({error})")
        return
    if theirs != ours:
        start = PROBE[:24]
        raise ValueError(
            f"{source}: its tokenizer reads {start!r}... as {theirs[:6]}..., that of the corpora as {ours[:6]}...: "
            f"prepare them with --tokenizer {spec}"
        )


def _asked_for(config: Config) -> str | None:
    """Return the folder from which a run starts, or None if there is none or it continues from checkpoints."""
    resumes = bool(checkpoints(config.run.folder / CHECKPOINTS)) or config.schedule.branch is not None
    return None if resumes else config.train.initialize_from


def fetch(config: Config, world: World) -> None:
    """Download the initial model if it is on the hub, on one rank of each host; all ranks must call.

    Raises:
        DamagedFileError: a host could not download it.
    """
    spec = config.train.initialize_from
    if spec is None or not spec.startswith(HUB):
        return
    problem = None
    if world.local_rank == 0:
        try:
            _download(spec)
        except (OSError, ValueError) as error:
            problem = f"rank {world.rank}: {error}"
    problems = [each for each in gather_objects(problem, world) if each is not None]
    if problems:
        raise DamagedFileError(f"train.initialize_from = {spec}: not downloaded: {'; '.join(problems)}")


def fetch_ahead(config: Config) -> None:
    """Download a new run's initial model if it is on the hub, which may be unreachable where the run trains.

    Raises:
        ValueError: it cannot be downloaded, and this machine has no whole copy.
    """
    spec = _asked_for(config)
    if spec is None or not spec.startswith(HUB):
        return
    try:
        _download(spec)
    except (OSError, ValueError) as error:
        raise ValueError(f"train.initialize_from = {spec}: not downloaded: {error}") from error


def _download(spec: str) -> None:
    """Download a hub model with its weights to this machine."""
    folder = hub_folder(spec, FILES)
    if not any(folder.glob(WEIGHTS)):
        remedy = (
            "and it has no others: nothing else is read"
            if is_reachable()
            else "and the hub cannot be reached; download them where it can, such as on a login node (HF_HOME is where "
            "copies are kept)"
        )
        raise ValueError(f"{folder} holds no {WEIGHTS}, {remedy}")


def initial_weights(config: Config) -> Mapping[str, Tensor] | None:
    """Return the initial fp32 weights by our names; missing ones (all if None) are drawn instead.

    Log whether the tensors of the run's objective are among them. A model on the hub must have been downloaded, see
    `fetch`.

    Raises:
        DamagedFileError: the folder lacks tensors that its configuration requires.
    """
    spec = config.train.initialize_from
    if spec is None:
        return None
    source = f"train.initialize_from = {spec}"
    forward = multipliers(config.model, config.parameterization)
    with reading(source):
        folder = _fetched_folder(spec)
        files = sorted(folder.glob(WEIGHTS))
        if not files:
            raise ValueError(f"{folder} holds no {WEIGHTS}; nothing else is read")
        read = read_weights(files)
        if wrong := [name for name, weight in read.items() if not weight.is_floating_point()]:
            raise ValueError(f"{folder}: {wrong[0]} is {read[wrong[0]].dtype}: no weights, or rounded ones")
        check_finite(read, folder, "copy the folder again, or start from another model")
        stock = {name: weight.float() for name, weight in read.items()}
        weights = from_stock(stock_entries(folder), stock, config.model, forward)
    found = {name: tuple(weight.shape) for name, weight in weights.items()}
    grafted = attention_kind(config.model).grafted
    expected = {name: shape for name, shape in parameter_shapes(config.model).items() if not name.endswith(grafted)}
    if found != expected:
        names = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        raise DamagedFileError(f"{source}: {folder} has other tensors: {', '.join(names[:4])}")
    return {**weights, **_objective_weights(config, folder)}


def _objective_weights(config: Config, folder: Path) -> Weights:
    """Return the tensors of the run's objective that the folder holds: all, or none. Log which, if there are any."""
    whole = parameter_shapes(config.model, config.objective)
    expected = {name: shape for name, shape in whole.items() if name not in parameter_shapes(config.model)}
    if not expected:
        return {}
    file, found = folder / thinker.FILE, None
    if isinstance(config.objective, LatentLookaheadConfig) and file.is_file():
        found = _read_thinker(config, file)
    if found is not None and {name: tuple(weight.shape) for name, weight in found.items()} == expected:
        TRAINING.info(f"thoughts from {file}")
        return found
    TRAINING.info(
        f"what objective.name = {config.objective.name} adds starts anew: {folder} has no such tensors of this shape"
    )
    return {}


def _read_thinker(config: Config, file: Path) -> Weights | None:
    """Return the tensors of an exported thinker under our names, or None if the run's decoder cannot use them."""
    with reading(file):
        with safe_open(file, "pt") as opened:
            tensors = {name: opened.get_tensor(name).float() for name in opened.keys()}  # noqa: SIM118 - no mapping
            settings = json.loads(opened.metadata()["settings"])
        check_finite(tensors, file.parent, "copy the folder again, or start from another model")
        forward = multipliers(config.model, config.parameterization)
        return thinker.thinker_from(stock_entries(file.parent), settings, tensors, config.model, forward)


def _fetched_folder(spec: str) -> Path:
    if not spec.startswith(HUB):
        return Path(spec)
    return hub_folder(spec, FILES, download=False)
