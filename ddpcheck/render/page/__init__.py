"""The HTML page of a report or a matrix: one file, no request, no script that runs.

`page` has the renderers, `sections` what parts of it show. The templates are of
jinja2, which torch needs as well: `page.html` is the frame, `parts.html` has the macros, and each section has a file.
"""
