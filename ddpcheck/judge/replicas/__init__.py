"""What has to be the same on every rank: modules, values, buffers, options, copies."""
