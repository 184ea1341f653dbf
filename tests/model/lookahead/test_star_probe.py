"""What is seen of a thought is where it says, and a probe finds what is there and nothing else."""

import torch

from plumbline.model.lookahead.thoughts import Thinker, ThoughtSettings
from tests.benchmarks.star_probe import named, observe
from tests.model.conftest import MakeModel


def test_states_are_those_of_text_and_slots_by_pass_and_layer(make_model: MakeModel) -> None:
    model = make_model().eval()
    thinker = Thinker(ThoughtSettings(2, "grow", passes=1, bidirectional=True), model.config.hidden_size)
    for parameter in thinker.parameters():
        torch.nn.init.ones_(parameter)
    tokens = torch.randint(0, model.config.vocab_size, (3, 7), generator=torch.Generator().manual_seed(1))
    seen = observe(model.model, thinker, tokens, source=4)
    assert list(seen) == ["text", "pass 1, slot 1", "pass 2, slot 1", "pass 2, slot 2"]
    assert {len(states) for states in seen.values()} == {model.config.num_hidden_layers + 1}
    finished = model.model.finish(seen["text"][-1])
    torch.testing.assert_close(finished, model.model(tokens)[:, 4])
    assert torch.equal(seen["pass 1, slot 1"][0], seen["pass 2, slot 1"][0])  # an input stays what it was
    carried = model.model.finish(seen["pass 1, slot 1"][-1]) * model.config.initializer_range + 1
    torch.testing.assert_close(seen["pass 2, slot 2"][0], carried * model.model.embedding_multiplier)
    assert not model.model.layers[0]._forward_hooks


def test_a_probe_names_what_states_hold_and_nothing_else() -> None:
    generator = torch.Generator().manual_seed(2)
    nodes = torch.randint(0, 8, (1500,), generator=generator)
    noise = torch.randn(1500, 16, generator=generator)
    code = torch.randn(8, 16, generator=generator)
    assert named(3 * code[nodes] + 0.1 * noise, nodes) == 1.0
    assert named(noise[:60], nodes[:60]) < 0.35  # an eighth by lot; of what it was fitted to it names most
