"""How Sphinx builds these pages: ``make docs``. Nothing is fetched; every internal link has to resolve."""

import precaudit

project = "precaudit"
author = copyright = "the precaudit authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click"]
exclude_patterns = ["description.md"]  # README.md as a package index shows it

html_theme = "furo"
html_title = project
html_copy_source = False
html_show_sphinx = False
smartquotes_action = "qe"  # quotes and ellipses; options begin with two hyphens

myst_heading_anchors = 3
autodoc_typehints = "description"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True

nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # types of other packages; pages link to pages by MyST, which is strict

for name in precaudit.__all__:  # autodoc shows what a module holds, and these are imported on first use
    setattr(precaudit, name, getattr(precaudit, name))
