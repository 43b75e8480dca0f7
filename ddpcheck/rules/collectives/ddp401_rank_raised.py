"""DDP401 rank-raised: error

The checked script or recipe raised an exception on a rank.

Why: The rank that raises leaves the others waiting in their next collective. The others fail later, with messages
    such as 'Connection closed by peer' that name the wrong place. The first failure is the one to read.
Fix: Fix the exception shown. The ranks that are listed below it failed as a consequence.
Detected: ddpcheck records when each rank ends. It reports the first exception that is not a consequence of another
    rank's failure, with its traceback.
Ignore: Never.
Example:
    def loss(model, batch):
        return cross_entropy(model(batch["x"]), batch["label"])   # KeyError; right: a key that the batch has
"""
