"""Optional features, imported by `ddpcheck.load_extra` only: the rest of ddpcheck works without them."""
