"""`ddpcheck graph`: the graph of a loss from the ranks to a picture."""
