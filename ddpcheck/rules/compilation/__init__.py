"""Functions compiled by torch.compile."""
