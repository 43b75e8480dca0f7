"""The HTML page of a report or a matrix: one file, no request, no script that runs.

`frame` has what every page has, `report_page` and `matrix_page` the two kinds; the others have a section each.
"""
