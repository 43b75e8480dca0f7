"""How ranks end: they raise, die, hang, part."""
