"""`ddpcheck init`: write a first recipe for a model, with guessed inputs."""
