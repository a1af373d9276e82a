"""Settings of Sphinx for the site that `python -m website` builds, which needs no network."""

project = "megaprec"
author = "the authors of megaprec"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
# Markdown of a Git host: its anchors of headings, its tables, and no typographer's quotes.
myst_heading_anchors = 6
myst_enable_extensions = ["attrs_inline"]
smartquotes = False
# Output of commands is no language, and some blocks are cut short.
highlight_language = "text"
suppress_warnings = ["misc.highlighting_failure"]
html_theme = "furo"
html_title = "megaprec"
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True
html_static_path = ["static"]
html_css_files = ["tables.css", "blocks.css"]
