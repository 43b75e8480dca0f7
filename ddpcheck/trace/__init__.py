"""Typed views of what ranks recorded, with queries: aligned over ranks, grouped, compared."""
