"""Look up the form of a law by name."""

from plumbline.model.scaling_laws.law import Law
from plumbline.model.scaling_laws.precision import PrecisionLaw
from plumbline.model.scaling_laws.variants import FloatLaw, GranularityLaw, PowerLaw

FORMS: dict[str, type[Law]] = {
    "precision": PrecisionLaw,
    "chinchilla": Law,
    "post_power": PowerLaw,
    "granularity": GranularityLaw,
    "float": FloatLaw,
}


def form_named(name: str) -> type[Law]:
    """Return the class of a form.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in FORMS:
        raise ValueError(f"form {name!r}: unknown; one of {', '.join(FORMS)}")
    return FORMS[name]


def name_of(law: Law) -> str:
    """Return the name of a law's form."""
    return next(name for name, form in FORMS.items() if type(law) is form)
