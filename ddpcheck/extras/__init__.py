"""What few users need; `ddpcheck.load_extra` imports it by name, and the rest of ddpcheck works without it."""
