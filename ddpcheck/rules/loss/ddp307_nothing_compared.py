"""DDP307 nothing-compared: error

Nothing was compared: every gradient was zero or missing.

Why: A comparison of zeros always passes. Such a check says nothing about the model, so it does not count as a pass.
Fix: Give the recipe a batch and a loss with a gradient: no empty mask, no factor of zero, no frozen model.
Detected: In every step, the norms of all gradients are zero, in the single process and on the ranks.
Ignore: Never. Such a check says nothing about the model.
Example:
    def loss(model, batch):
        return (model(batch["x"]) * batch["mask"]).sum()   # the mask is all zeros; right: a batch with something in it
"""
