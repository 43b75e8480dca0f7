"""Recording, on a rank: what a training loop does is written down, and judged by nobody yet."""
