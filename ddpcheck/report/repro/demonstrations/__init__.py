"""The code of the scripts: a training loop, and demonstrations that take a recipe.

A script has copies of what its demonstration needs. Read as text, never imported.
"""
