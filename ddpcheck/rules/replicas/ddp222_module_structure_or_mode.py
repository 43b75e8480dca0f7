"""DDP222 module-structure-or-mode: error

The classes of the modules, or their mode (train or eval), differ between ranks.

Why: Equal parameters do not make an equal function. For example, one rank has a ReLU and another a GELU, or dropout
    is switched off on one rank. DDP then silently averages gradients of different models.
Fix: Build the same structure on every rank, and call train() or eval() on every rank at the same places.
Detected: Before DDP's first collective, the ranks compare their modules by name: the class, the options and the mode
    (train or eval). In later steps, the ranks compare the mode again.
Ignore: If modules of different ranks compute different functions on purpose.
Explains: DDP214 DDP215 DDP216 DDP301 DDP302 DDP304 DDP305 DDP312 DDP516
Example:
    if dist.get_rank() == 0:
        evaluate(model)                      # calls model.eval() and does not go back; right: model.train() after it
"""
