"""Templates of pages that need nothing else: the same bytes for the same findings, and foreign text does nothing."""

from __future__ import annotations

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from isophase.audit.report.words import plain

OWN = "isophase.audit.report"


def page_templates(package: str = OWN) -> Environment:
    """The templates that lie in a package, with the style sheet of the audit's report.

    Args:
        package: dotted name.
    """
    return Environment(
        loader=ChoiceLoader([PackageLoader(name, ".") for name in dict.fromkeys((package, OWN))]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )


def _finalize(value: object) -> object:
    """Foreign text loses its control characters; our own markup passes."""
    return plain(value) if isinstance(value, str) and not isinstance(value, Markup) else value
