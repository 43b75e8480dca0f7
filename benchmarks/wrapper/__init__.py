"""What a healthy step of `CheckedDistributedDataParallel` costs, beside plain DDP and others."""
