"""ddpcheck inside training frameworks: a module for each, which imports it and is imported by nothing but its users."""
