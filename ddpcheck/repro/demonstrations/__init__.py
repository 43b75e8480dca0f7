"""The demonstrations: ordinary code, of which a script gets what its `main` needs.

Read as text, never imported.
"""
