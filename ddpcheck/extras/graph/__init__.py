"""`ddpcheck graph`: trace the graph of a loss and draw a picture."""
