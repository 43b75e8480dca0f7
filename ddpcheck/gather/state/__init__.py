"""State of a rank: module, random numbers, samples, and state outside of modules."""
