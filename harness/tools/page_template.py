"""The template of an HTML page that needs no script and no network: everything that it is given is escaped."""

from pathlib import Path
from typing import Any

import jinja2

NAME = "page.html.jinja"


def page_template(folder: Path, **shared: Any) -> jinja2.Template:
    """Return a room's template. shared: what its macros may use too."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        autoescape=True,
    )
    return environment.get_template(NAME, globals=shared)
