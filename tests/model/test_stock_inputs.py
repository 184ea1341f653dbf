"""How modules of transformers, whatever its version, are called."""

from torch import nn

from plumbline.model.stock_inputs import cache_argument


class Since524(nn.Module):
    def forward(self, cache: object = None) -> object:
        return cache


class Before(nn.Module):
    def forward(self, past_key_values: object = None) -> object:
        return past_key_values


class OurOwn(nn.Module):
    """Hand all that it is given to another module."""

    def forward(self, **given: object) -> object:
        return given


def test_a_cache_goes_by_the_name_that_a_module_has_for_it() -> None:
    assert [cache_argument(module) for module in (Since524(), Before(), OurOwn())] == [
        "cache", "past_key_values", "past_key_values"
    ]  # fmt: skip
