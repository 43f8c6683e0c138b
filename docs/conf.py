"""Sphinx builds the site from docs/*.md and the docstrings: `make docs`. Warnings are errors, among them links to
pages, headings and files that are not there."""

import inspect
import re
import sys
from pathlib import Path

from sphinx.util.inspect import stringify_signature

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import hybrid_ep  # noqa: E402

project = "hybrid_ep"
author = "The hybrid_ep authors"
project_copyright = f"2026, {author}"
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
maximum_signature_line_length = 88
autodoc_default_options = {"members": True}  # no "Bases: object"; errors ask for theirs

html_theme = "furo"
html_title = f"hybrid_ep {release}"
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
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


def signature_of_named(app, what, name, obj, options, signature, returned):
    """The classes that runtime.names counts have a __new__ that takes anything; what they take, __init__ says."""
    if what == "class" and signature and "_keywords" in signature:
        declared = inspect.signature(obj.__init__)
        parameters = list(declared.parameters.values())[1:]
        shown = declared.replace(parameters=parameters, return_annotation=inspect.Signature.empty)
        return stringify_signature(shown), returned
    return None


def link_pages(app, what, name, obj, options, lines):
    """A docstring names a page as it lies in a checkout, docs/design.md#memory; on the site that is a link."""

    def link(match):
        page, anchor = match[1], match[2] or ""
        text = f"docs/{page}.md{anchor}"
        return f"`{text} <{page}.html{anchor}>`__" if anchor else f":doc:`{text} </{page}>`"

    lines[:] = [re.sub(r"`?\bdocs/([\w/-]+)\.md(#[\w-]+)?`?", link, line) for line in lines]


def setup(app):
    app.connect("builder-inited", write_environment_table)
    app.connect("autodoc-process-docstring", link_pages)
    app.connect("autodoc-process-signature", signature_of_named)
    app.connect("autodoc-skip-member", skip_fields_of_tuples)
