"""ddpcheck inside training frameworks: each module imports its framework, and is imported by nothing but its users."""
