"""The assertions for tests of distributed training, and what they ask of each rank."""
