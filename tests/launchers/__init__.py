"""What real launchers start, and on what: a rank's program, two nodes on one machine, a SLURM of our own."""
