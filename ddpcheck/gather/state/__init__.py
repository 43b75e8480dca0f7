"""The state of a rank: its module, its random numbers, its samples, and what lies outside of modules."""
