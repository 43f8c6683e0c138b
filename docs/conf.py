"""Sphinx builds the site from docs/*.md and the docstrings: `make docs`. Warnings are errors, among them links to
pages, headings and files that are not there."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import hybrid_ep  # noqa: E402

project = "hybrid_ep"
author = "The hybrid_ep authors"
release = version = hybrid_ep.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
exclude_patterns = ["_build", "_generated"]
nitpicky = False

# ```{toctree}, tables, and anchors of headings up to ### as GitHub makes them.
myst_heading_anchors = 3
myst_enable_extensions = ["deflist"]

default_role = "literal"  # of `name` in a docstring
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": False}

html_theme = "furo"
html_title = f"hybrid_ep {release}"
html_show_sphinx = False
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True


def write_environment_table(app):
    """The table that hybrid_ep/env.py is."""
    from hybrid_ep import env

    folder = Path(app.srcdir) / "_generated"
    folder.mkdir(exist_ok=True)
    (folder / "environment.md").write_text(env.table() + "\n")


def skip_fields_of_tuples(app, what, name, obj, skip, options):
    """A NamedTuple says in its own docstring what its fields are; Python's "Alias for field number 0" adds nothing."""
    return True if (getattr(obj, "__doc__", None) or "").startswith("Alias for field number") else None


def setup(app):
    app.connect("builder-inited", write_environment_table)
    app.connect("autodoc-skip-member", skip_fields_of_tuples)
