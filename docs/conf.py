"""How Sphinx builds these pages: `sphinx-build -W docs OUT`."""

import inspect
import re
from typing import Any

import dualmesh

project = "dualmesh"
author = "the dualmesh authors"
release = dualmesh.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "dualmesh"
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
autodoc_typehints = "none"  # signatures have them
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
default_role = "code"  # docstrings write `names` so


def _without_methods_of_builtins(app: Any, what: str, name: str, value: Any, skip: bool, options: Any) -> bool | None:
    """Leave out what named tuples and exceptions bring along."""
    return True if getattr(value, "__module__", None) in ("builtins", None) and what == "class" else None


def _with_every_public_name(app: Any, page: str, source: list[str]) -> None:
    """Append to the reference what it does not name yet."""
    if page != "api":
        return
    lines = []
    for name in dualmesh.__all__:
        if not re.search(rf"(:: |dualmesh\.){name}\b", source[0]) and not hasattr(dualmesh.errors, name):
            value = getattr(dualmesh, name)
            kind = "module" if inspect.ismodule(value) else "class" if inspect.isclass(value) else "function"
            lines += [f".. auto{kind}:: dualmesh.{name}", *([] if kind == "function" else ["   :members:"])]
    if lines:
        source[0] += "\n## Further\n\n```{eval-rst}\n" + "\n".join(lines) + "\n```\n"


def setup(app: Any) -> None:
    """Register what this file adds."""
    app.connect("autodoc-skip-member", _without_methods_of_builtins)
    app.connect("source-read", _with_every_public_name)
