"""DDP602 environment-differs: warning, keeps_gradients, keeps_results

Versions or settings that affect numbers or communication differ between ranks.

Why: Different versions of torch or of the backend, a different device model, or different settings for threads or
    determinism may change the numbers, the choice of algorithms, or whether ranks can communicate. DDP averages the
    gradients nevertheless.
Fix: Start every rank from the same image and the same environment variables.
Detected: No check reports this code today. The head of a report names the platform and the versions of Python and
    torch.
Ignore: It is never reported.
"""
