"""`ddpcheck init`: a first recipe for a model, with inputs that its forward accepts."""
