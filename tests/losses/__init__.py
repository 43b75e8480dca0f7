"""Everyday losses, each normalised rightly and wrongly for ranks with unequal shares of what is counted."""
