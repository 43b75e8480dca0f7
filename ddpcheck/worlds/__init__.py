"""The processes behind a `World`: the fork server, the ranks' life and death, and what travels between them."""
