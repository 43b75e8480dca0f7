"""HTML page of a report or matrix: one file, without requests or running scripts.

`page` has the renderer, `sections` the data of the templates. Templates use jinja2, a dependency of torch: `page.html`
is the frame, `parts.html` has the macros, and each section has a file.
"""
