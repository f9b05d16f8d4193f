"""The templates of HTML pages: every text in them is escaped, and no script runs but a page's own."""

from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from importlib import resources
from typing import Any

from precaudit.reports.escaping import escape_html
from precaudit.reports.meanings import meaning


def template_file(name: str) -> str:
    """Return a file of precaudit/templates."""
    return (resources.files("precaudit") / "templates" / name).read_text(encoding="utf-8")


@cache
def page(name: str) -> Any:
    """Return a template, in which every text is escaped."""
    from jinja2 import Environment, FunctionLoader
    from markupsafe import Markup

    def show(x: object) -> Any:
        return Markup(escape_html(x)) if isinstance(x, str) and not isinstance(x, Markup) else x

    made = Environment(
        autoescape=True, finalize=show, trim_blocks=True, lstrip_blocks=True, loader=FunctionLoader(template_file)
    )
    made.filters["raw"] = Markup
    made.globals |= {"meaning": meaning, "style": template_file("report.css"), "policy": policy()}
    return made.get_template(name)


def markup(made: str) -> Any:
    """Return what a cell of a table shows as it is: its texts are escaped already."""
    from markupsafe import Markup

    return Markup(made)


def policy(scripts: Sequence[str] = ()) -> str:
    """Return a content security policy: nothing is fetched, and no script runs but these."""
    known = " ".join(f"'sha256-{b64encode(sha256(s.encode()).digest()).decode()}'" for s in scripts) or "'none'"
    return f"default-src 'none'; script-src {known}; style-src 'unsafe-inline'; img-src data:; form-action 'none'"
