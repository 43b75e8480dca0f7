"""The phases of a check, as ranks and the single process run them; `calls` is how they are asked to."""
