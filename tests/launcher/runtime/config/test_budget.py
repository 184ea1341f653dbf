"""How many parameters a run has, by what they are counted for."""

from pathlib import Path

from plumbline.launcher.runtime.config.budget import ParameterCount, totals
from plumbline.launcher.runtime.config.load import load_config
from plumbline.launcher.runtime.config.plan import plan_run
from plumbline.model.parameterization.skeleton import parameter_count


def test_frozen_mixing_matrices_are_no_parameters_of_a_law(tiny_config: Path) -> None:
    """They grow with the square of the context, and neither learn nor decide the tokens that a model needs."""
    found = []
    for length in (64, 256):
        config = load_config(tiny_config, ["model.family=mixit", f"model.max_position_embeddings={length}"])
        plan = plan_run(config)
        mixing = config.model.num_hidden_layers * config.model.num_attention_heads * length**2
        count = totals(plan.rows)
        embeddings = 2 * config.model.vocab_size * config.model.hidden_size
        assert count.total == mixing + embeddings + count.non_embedding
        assert parameter_count(config.model) == count.total - mixing
        found.append((plan.proportions.tokens_per_parameter, count.non_embedding, count.trained))
    assert found[0] == found[1]


def test_frozen_matrices_are_counted_and_not_trained(tiny_config: Path) -> None:
    plain, frozen = (
        totals(plan_run(load_config(tiny_config, [f"model.frozen_mlp={value}"])).rows) for value in ("false", "true")
    )
    assert plain.trained == plain.total
    assert frozen == ParameterCount(plain.total, plain.non_embedding, frozen.trained)
    assert frozen.trained < plain.trained
