"""What a distributed test costs: ddpcheck beside the harnesses that people use, on one machine in one run."""
